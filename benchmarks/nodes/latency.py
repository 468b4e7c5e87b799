"""An environment that only waits: what is left is what rollouts themselves cost.

The agent sleeps as a model and its tools would and answers with tokens of its own making, so that
no model is needed. The worker serves it in the usual way, over HTTP.
"""

from __future__ import annotations

import contextlib
import os
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.benchmark.base import simple_agent_servers
from gymrl.config import GymConfig, RolloutConfig
from gymrl.gym.embedded.agent import AgentServer, AgentSettings, Episode
from gymrl.gym.embedded.resources import ResourcesServer, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gymrl.gym.embedded.reply import Reply

ROUTE = "latency"


class LatencySettings(AgentSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings.

    Attributes:
        latency_s: How long an episode takes.
        tokens: Sampled tokens of an episode.
    """

    latency_s: float = 1.0
    tokens: int = 512


class LatencyAgent(AgentServer):
    """Sleeps, and answers. A row with ``die`` kills its worker."""

    Settings = LatencySettings

    async def responses(self, params: dict[str, msgspec.Raw], episode: Episode) -> bytes:
        """One answer of made-up tokens."""
        text = bytes(params["input"]).decode()
        if "die" in text:
            os._exit(3)
        await anyio.sleep(self.settings.latency_s)
        count = self.settings.tokens
        message = {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "done", "annotations": []}],
            "prompt_token_ids": list(range(32)),
            "generation_token_ids": list(range(count)),
            "generation_log_probs": [-0.5] * count,
        }
        response = {"id": "resp_1", "object": "response", "output": [message]}
        return msgspec.json.encode(response)


class LatencyVerifier(ResourcesServer):
    """Gives each episode the reward that its row names, and says where it ran."""

    async def verify(self, row: dict[str, Any], reply: Reply, state: None) -> Verdict:
        """The row's reward."""
        return Verdict(reward=float(row.get("reward", 1.0)), extras={"pid": os.getpid()})


def latency_rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Rows of the environment."""
    return [
        {
            "task_source": ROUTE,
            "responses_create_params": {"input": [{"role": "user", "content": f"row {index}"}]},
            **fields,
        }
        for index in range(count)
    ]


class _Policy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the base class names it
        self.send_response(HTTPStatus.OK)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # as above
        """Say nothing."""


@contextlib.contextmanager
def policy_server(host: str = "127.0.0.1") -> Iterator[str]:
    """A server that workers find to be up, and that nobody asks anything; its ``/v1`` address."""
    with ThreadingHTTPServer((host, 0), _Policy) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def latency_config(
    base_url: str,
    *,
    latency_s: float,
    tokens: int = 512,
    max_connections: int = 0,
    **settings: Any,
) -> RolloutConfig:
    """An engine over the environment, without a generator."""
    servers = simple_agent_servers(
        ROUTE, ROUTE, {"entrypoint": f"{__name__}:LatencyVerifier"}, max_steps=1
    )
    agent = servers[f"{ROUTE}_simple_agent"]["responses_api_agents"]["simple_agent"]
    agent |= {
        "entrypoint": f"{__name__}:LatencyAgent",
        "latency_s": latency_s,
        "tokens": tokens,
    }
    gym = GymConfig(
        servers=servers,
        base_urls=(base_url,),
        decode_text=False,
        max_connections=max_connections,
    )
    return RolloutConfig(gym=gym, **settings)
