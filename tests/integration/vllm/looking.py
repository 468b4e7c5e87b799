"""An agent whose tools show pictures, whatever its model says, and the environment around it."""

from typing import Any

import msgspec

from gymrl.gym.embedded.agent import AgentServer, Episode
from gymrl.gym.embedded.reply import Reply
from gymrl.gym.embedded.resources import ResourcesServer, Verdict
from gymrl.gym.schema import plain
from gymrl.testing import build_image_uri

SMALL = (28, 56, 21)
"""What a tool's answer shows, as a text: the URL alone."""

TALL = (56, 112, 22)
"""What a part of a tool's answer shows."""


ROUTE = "looking_agent"
SERVERS = {
    "looking": {
        "resources_servers": {
            "looking": {"entrypoint": "tests.integration.vllm.looking:LookingEnvironment"}
        }
    },
    ROUTE: {
        "responses_api_agents": {
            "looking": {
                "entrypoint": "tests.integration.vllm.looking:LookingAgent",
                "resources_server": {"type": "resources_servers", "name": "looking"},
                "model_server": {"type": "responses_api_models", "name": "policy_model"},
            }
        }
    },
}


class LookingAgent(AgentServer):
    """Three turns: the row's question, a picture, and a picture beside words."""

    async def responses(self, params: dict[str, msgspec.Raw], episode: Episode) -> bytes:
        items: list[Any] = list(plain(params["input"]))
        outputs: list[Any] = []
        shown = [
            None,
            build_image_uri(*SMALL),
            [
                {"type": "input_text", "text": "and "},
                {"type": "input_image", "image_url": build_image_uri(*TALL)},
            ],
        ]
        answer: dict[str, Any] = {}
        for output in shown:
            if output is not None:
                call = {"type": "function_call_output", "call_id": "c", "output": output}
                outputs.append(call)
            request = {**{k: plain(v) for k, v in params.items()}, "input": [*items, *outputs]}
            answer = msgspec.json.decode(await episode.ask_model(msgspec.json.encode(request)))
            outputs += answer["output"]
        return msgspec.json.encode({**answer, "output": outputs})


class LookingEnvironment(ResourcesServer):
    """Content with everything."""

    async def verify(self, row: dict[str, Any], reply: Reply, state: None) -> Verdict:
        return Verdict(reward=1.0)
