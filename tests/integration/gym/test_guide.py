"""The environment of the guide works as it stands there."""

import json
import re
from pathlib import Path

import yaml

from gymrl.actors import spawn
from gymrl.config import GymConfig
from gymrl.gym.service import GymService
from gymrl.testing.model_server import ModelCall, ScriptedModelServer
from gymrl.types import Row

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "environments.md"


def block(language):
    return re.search(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL).group(1)


async def test_the_guides_environment_rolls_out_the_guides_row(tmp_path, monkeypatch):
    (tmp_path / "my_environments.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    servers = yaml.safe_load(block("yaml"))
    row = json.loads(block("json"))
    script = [
        ModelCall(tool_calls=(("count_words", '{"text": "to be continued"}'),)),
        ModelCall(text="3"),
    ]
    body = json.dumps(row).encode()
    prepared = Row(
        index=0, task_index=0, rollout_index=0, route="word_count", rollout_id="r", body=body
    )
    async with ScriptedModelServer(script) as model:
        async with spawn(GymService, in_process=True, config=GymConfig(servers=servers)) as gym:
            await gym.call("spin_up", [model.base_url], "policy")
            [result] = [r async for r in gym.stream("run_rollouts", [prepared])]
    assert result.outcome.reward.verifier == 1.0
    items = json.loads(result.outcome.result)["response"]["output"]
    assert [i["output"] for i in items if i["type"] == "function_call_output"] == ["3"]
