"""Commands over a policy server that wants a key: the command line has its variable's name."""

import subprocess
import sys

import anyio
import pytest

from gymrl.cli.app import run_app
from gymrl.cli.discovery import served_model_name
from gymrl.errors import ConfigError
from gymrl.evaluation import EvaluationSettings, RunOptions, plan_evaluation, run_evaluation
from gymrl.generation.server_check import check_server
from gymrl.records import read_groups

# Each run starts several interpreters; a busy machine gets time for that.
pytestmark = pytest.mark.timeout(240)


async def gymrl(*arguments):
    done = await anyio.run_process(
        [sys.executable, "-m", "gymrl", *arguments], stderr=subprocess.PIPE, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def test_a_rollout_with_a_key_asks_for_the_name_and_writes_no_key(
    keyed_policies, variable, tmp_path
):
    policy = keyed_policies[0]
    output = tmp_path / "rollouts.jsonl"
    code, printed, told = await gymrl(
        "rollout", "chain_sum", "--base-url", policy.base_url, "--api-key-env", variable,
        "--num-prompts", "2", "--in-process", "--output", str(output),
    )  # fmt: skip
    assert code == 0, told
    assert [len(group.trajectories) for group in read_groups(output)] == [1, 1]
    assert [body["model"] for body in policy.bodies] == ["policy", "policy"]
    assert policy.key not in printed + told + output.read_text()


@pytest.mark.parametrize("command", ["rollout", "doctor"])
def test_a_key_belongs_to_a_server(command, capsys):
    target = ("chain_sum",) if command == "rollout" else ()
    assert run_app([command, *target, "--model", "smollm2", "--api-key-env", "SOME_KEY"]) == 2
    assert "add its --base-url" in " ".join(capsys.readouterr().err.split())


async def test_the_doctor_looks_at_a_server_with_its_key(keyed_policies, variable, capsys):
    policy = keyed_policies[0]
    asked = ["doctor", "--base-url", policy.base_url, "--api-key-env", variable]
    await anyio.to_thread.run_sync(run_app, asked)
    printed = " ".join(capsys.readouterr().out.split())
    assert "token ids and log-probabilities come back" in printed
    assert "64 tokens" in printed
    assert set(policy.headers) == {f"Bearer {policy.key}"}


async def test_the_doctor_says_at_once_that_a_server_wants_a_key(keyed_policies, capsys):
    policy = keyed_policies[0]
    asked = ["doctor", "--base-url", policy.base_url]
    assert await anyio.to_thread.run_sync(run_app, asked) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "/models answered HTTP 401" in printed
    assert "--api-key-env" in printed
    assert policy.headers == [""]


async def test_the_doctor_does_not_show_a_key_that_is_refused(keyed_policies):
    policy = keyed_policies[0]
    [finding] = await check_server(policy.base_url, api_key=policy.wrong_key)
    assert (finding.check, finding.severity) == ("key", "break")
    assert "Bearer (the key)" in finding.found
    assert policy.wrong_key not in finding.found + finding.remedy


async def test_a_served_models_name_is_asked_for_with_the_key(keyed_policies):
    policy = keyed_policies[0]
    assert await served_model_name(policy.base_url, policy.key) == "policy"
    with pytest.raises(ConfigError, match="not one it takes") as caught:
        await served_model_name(policy.base_url, policy.wrong_key)
    assert policy.wrong_key not in caught.value.message
    with pytest.raises(ConfigError, match=r"HTTP 401.*holds its key with --api-key-env"):
        await served_model_name(policy.base_url)


async def test_an_evaluation_with_a_wrong_key_ends_before_any_row(keyed_policies, tmp_path):
    policy = keyed_policies[0]
    settings = EvaluationSettings.from_dict({"policy": {"name": "policy"}})
    plan = plan_evaluation(["chain_sum"], settings, overrides={"num_tasks": 1})
    options = RunOptions(base_urls=(policy.base_url,), api_key=policy.wrong_key, in_process=True)
    with pytest.raises(ConfigError, match=r"HTTP 401.*Bearer \(the key\).*api_key"):
        await run_evaluation(plan, tmp_path, options)
    assert (tmp_path / "rollouts.jsonl").read_text().count("\n") <= 1
