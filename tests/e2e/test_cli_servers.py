"""The command line against servers that somebody else runs: a policy, a registry of Gym servers."""

import os
import re
import subprocess
import sys

import anyio
import pytest

from gymrl.actors import spawn
from gymrl.benchmark import load_benchmark
from gymrl.config import GenerationConfig, GymConfig
from gymrl.generation.base import Generated
from gymrl.generation.chat import ChatFormat
from gymrl.generation.policy import Policy
from gymrl.generation.server import GenerationServer
from gymrl.gym.service import GymService
from gymrl.records import read_groups
from gymrl.testing import ScriptedGenerator, build_tiny_tokenizer

# Each run starts several interpreters; a busy machine gets time for that.
pytestmark = pytest.mark.timeout(240)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


async def gymrl(*arguments):
    done = await anyio.run_process(
        [sys.executable, "-m", "gymrl", *map(str, arguments)],
        stderr=subprocess.PIPE,
        check=False,
        env=ENVIRONMENT,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Solver:
    """A policy that looks numbers up one by one, computes, and answers."""

    def __init__(self):
        self._tokenizer = build_tiny_tokenizer()
        self._end = self._tokenizer.eos_token_id

    def __call__(self, prompt_ids, sampling):
        prompt = self._tokenizer.decode(prompt_ids)
        text = self._next(prompt)
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._end]
        return Generated(token_ids=ids, logprobs=[-0.25] * len(ids), finish_reason="stop")

    def _next(self, prompt):
        terms = re.findall(r"(\d+) times the number of (\w+)", prompt)
        seen = re.findall(r"<tool_response>\s*(.*?)\s*</tool_response>", prompt, re.DOTALL)
        if len(seen) < len(terms):
            return self._call("lookup", f'{{"name": "{terms[len(seen)][1]}"}}')
        if len(seen) == len(terms):
            products = [f"{terms[k][0]} * {seen[k]}" for k in range(len(terms))]
            return self._call("calculator", f'{{"expression": "{" + ".join(products)}"}}')
        return f"The answer is {seen[-1]}"

    @staticmethod
    def _call(name, arguments):
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    def server(self):
        generator = ScriptedGenerator(self, max_model_len=8192)
        config = GenerationConfig(model="tiny", tool_parser="hermes")
        chat = ChatFormat.from_config(self._tokenizer, config, (self._end,))
        return GenerationServer(Policy(generator, chat, model_name="solver"))


@pytest.fixture
async def solver_url():
    server = Solver().server()
    url = await server.start()
    yield url
    await server.close()


async def test_a_policy_that_uses_its_tools_earns_its_rewards_over_several_turns(
    solver_url, tmp_path
):
    output = tmp_path / "rollouts.jsonl"
    code, out, errors = await gymrl(
        "rollout", "tool_arithmetic", "--base-url", solver_url, "--num-prompts", 4,
        "--num-generations", 2, "--in-process", "--output", output,
    )  # fmt: skip
    assert code == 0, errors
    assert re.search(r"tool_arithmetic │ +4 │ +8 │ +0 │ +100\.0% │ +1\.000 ", out), out
    for group in read_groups(output):
        for trajectory in group.trajectories:
            assert len(trajectory.turns) == 4
            assert trajectory.reward.total == 1.0
    assert len(list(read_groups(output))) == 4


async def test_rows_can_go_to_gym_servers_that_run_already(solver_url, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    servers = load_benchmark("tool_arithmetic", num_tasks=1).servers
    async with spawn(GymService, in_process=True, config=GymConfig(servers=servers)) as gym:
        endpoint = await gym.call("spin_up", [solver_url], "solver")
        code, out, errors = await gymrl(
            "rollout", "tool_arithmetic", "--registry", endpoint.registry_url,
            "--num-prompts", 3, "--in-process", "--output", output,
        )  # fmt: skip
    assert code == 0, errors
    assert "100.0%" in out
    assert len(list(read_groups(output))) == 3


async def test_a_policy_server_that_is_not_there_is_one_message_with_its_url(tmp_path):
    code, out, errors = await gymrl(
        "rollout", "chain_sum", "--base-url", "http://127.0.0.1:9/v1", "--in-process"
    )
    assert code == 1
    assert "http://127.0.0.1:9/v1/models" in errors
    assert "Traceback" not in out + errors


async def test_a_policy_server_that_is_none_is_named(solver_url):
    code, _, errors = await gymrl(
        "rollout", "chain_sum", "--base-url", solver_url.removesuffix("/v1"), "--in-process"
    )
    assert code == 1
    assert "does --base-url end in /v1?" in errors


async def test_a_registry_that_is_not_there_is_one_message_with_its_url(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("gym: {spinup_timeout_s: 0.5}\n")
    code, out, errors = await gymrl(
        "rollout", "chain_sum", "--registry", "http://127.0.0.1:9", "--in-process",
        "--config", config,
    )  # fmt: skip
    assert code == 1
    assert "http://127.0.0.1:9" in errors
    assert "Traceback" not in out + errors
