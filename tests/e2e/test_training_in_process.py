"""Everything in one process: a breakpoint in the verifier stops, and shows what is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gymrl.recipes import checkpoint
from gymrl.recipes.say_word import build_word_model

ROOT = Path(__file__).parents[2]

ENVIRONMENT = """
from gymrl.gym.embedded.resources import ResourcesServer, Verdict

class Stopping(ResourcesServer):
    async def verify(self, row, reply, state):
        breakpoint()
        return Verdict(reward=1.0)
"""

SCRIPT = """
import gymrl.torchrun
from gymrl import GenerationConfig, GymConfig, RolloutConfig, SamplingParams
from gymrl.benchmark.base import simple_agent_servers
from gymrl.recipes.say_word import ROUTE, build_word_model, say_word_rows

config = RolloutConfig(
    generation=GenerationConfig(model=str(build_word_model("model", layers=1)), num_threads=1),
    gym=GymConfig(
        servers=simple_agent_servers(ROUTE, ROUTE, {"entrypoint": "stopping:Stopping"}, 1),
        decode_text=False,
    ),
    sampling=SamplingParams(max_tokens=3),
    in_process=True,
)
with gymrl.torchrun.rollouts(config) as rollouts:
    share = rollouts.collect(say_word_rows()[:1])
    print("reward", share.metrics["reward_mean"])
"""


def run(command, directory, commands="", timeout=100):
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        input=commands,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{directory}"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.timeout(120)
def test_a_breakpoint_in_the_verifier_stops_the_rollout(tmp_path):
    (tmp_path / "stopping.py").write_text(ENVIRONMENT)
    (tmp_path / "script.py").write_text(SCRIPT)
    commands = "p ('asked for', row['word'])\np ('words said', len(reply.text.split()))\nc\n"
    done = run(["script.py"], tmp_path, commands)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "('asked for', 'red')" in done.stdout
    assert "('words said'," in done.stdout
    assert "reward 1.0" in done.stdout


@pytest.mark.timeout(120)
def test_the_trainer_runs_in_one_process_without_a_token_for_padding(tmp_path):
    model = build_word_model(tmp_path / "model", layers=1)
    described = json.loads((model / "tokenizer_config.json").read_text())
    del described["pad_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    arguments = ["-m", "gymrl.recipes.grpo", "--in-process", "--set", f"model={model}"]
    settings = ("steps=2", "num_generations=4", "validate_every=1", "tensorboard=false")
    for assignment in (f"output={tmp_path}", *settings, "kl_coefficient=0.1"):
        arguments += ["--set", assignment]
    done = run(arguments, ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert checkpoint.latest(tmp_path).name == "step_00000002.pt"
    # The policy leaves the one that it is held to.
    assert second["kl"] > first["kl"] > 0
