"""The command line as a user runs it: real processes, a real (tiny) model, real servers."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

from gymrl.records import read_groups, read_records, read_run
from gymrl.testing.models import build_tiny_model
from gymrl.types import Trajectory

# Each run starts several interpreters; a busy machine gets time for that.
pytestmark = pytest.mark.timeout(240)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
GENEROUS_S = 90.0
# The promise is 3 s; a busy machine gets more before the test calls it broken.
ENDED_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


def gymrl(*arguments):
    return [sys.executable, "-m", "gymrl", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(
        gymrl(*arguments),
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
        env=ENVIRONMENT,
        check=False,
    )


def start(*arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(gymrl(*arguments), env=ENVIRONMENT, **options)


def descendants(pid):
    return psutil.Process(pid).children(recursive=True)


def wait_until(condition, what):
    end = time.monotonic() + GENEROUS_S
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"{what} did not happen within {GENEROUS_S:g} s")
        time.sleep(0.05)


def hear(process, words):
    """Wait until a process has said this on standard error."""
    for line in process.stderr:
        if words in line:
            return
    pytest.fail(f"it ended without having said {words!r}")


def outcomes(path):
    """What a run gave, by task and attempt, in an order of its own."""
    return {
        (record.task_index, record.rollout_index): (
            record.trajectory.token_ids,
            record.trajectory.logprobs,
            record.trajectory.reward.total,
        )
        for record in read_records(path)
    }


ROLLOUT = ("--num-prompts", 3, "--num-generations", 2, "--max-output-tokens", 8)


def test_a_rollout_writes_every_row_and_reports_them(tiny_model, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    done = run("rollout", "chain_sum", "--model", tiny_model, *ROLLOUT, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "groups 3/3" in done.stderr
    assert re.search(r"chain_sum +│ +3 +│ +6 +│ +0 ", done.stdout), done.stdout
    assert f"6 rows written to {output}" in done.stdout
    assert read_run(output).notes["benchmark"] == "chain_sum"
    groups = list(read_groups(output))
    assert sorted(group.index for group in groups) == [0, 1, 2]
    for group in groups:
        for sample in group.samples:
            assert isinstance(sample, Trajectory)
            assert 0 < sample.num_generated <= 8
            assert (sample.logprobs[sample.token_mask()] < 0).all()


def test_one_process_and_its_ledger_give_the_same_tokens_as_several_and_their_messages(
    tiny_model, tmp_path
):
    apart, together = tmp_path / "apart.jsonl", tmp_path / "together.jsonl"
    common = ("rollout", "chain_sum", "--model", tiny_model, *ROLLOUT, "--seed", 3)
    first = run(*common, "--batch-size", 1, "--output", apart)
    second = run(
        *common, "--batch-size", 1, "--in-process", "--token-source", "ledger", "--output", together
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert len(outcomes(apart)) == 6
    assert outcomes(apart) == outcomes(together)


def test_another_seed_gives_other_tokens(tiny_model, tmp_path):
    files = [tmp_path / f"{seed}.jsonl" for seed in (1, 2)]
    for seed, file in zip((1, 2), files, strict=True):
        done = run(
            "rollout", "chain_sum", "--model", tiny_model, *ROLLOUT, "--in-process",
            "--seed", seed, "--output", file,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert outcomes(files[0]) != outcomes(files[1])


def test_two_workers_share_the_groups(tiny_model, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    done = run(
        "rollout", "chain_sum", "--model", tiny_model, *ROLLOUT, "--workers", 2, "-o", output
    )
    assert done.returncode == 0, done.stderr
    assert len(outcomes(output)) == 6


def test_tools_are_offered_over_several_turns(tiny_model, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    done = run(
        "rollout", "tool_arithmetic", "--model", tiny_model, "--num-prompts", 2,
        "--max-output-tokens", 16, "--in-process", "--output", output,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(outcomes(output)) == 2


def test_rows_of_a_file_run_on_servers_of_a_file(tiny_model, tmp_path):
    rows, servers = tmp_path / "rows.jsonl", tmp_path / "servers.yaml"
    output = tmp_path / "rollouts.jsonl"
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {}}
    row = {
        "task_source": "sums",
        "dataset": "chain_sum",
        "entry": entry,
        "responses_create_params": {"input": "1 + 2 ="},
    }
    rows.write_text(json.dumps(row) + "\n")
    servers.write_text(
        """
sums:
  resources_servers:
    reasoning_gym:
      entrypoint: gymrl.gym.embedded.reasoning_gym:ReasoningGymServer
      answer_extractor: last_integer
sums_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: gymrl.gym.embedded.simple_agent:SimpleAgent
      resources_server: {type: resources_servers, name: sums}
      model_server: {type: responses_api_models, name: policy_model}
      max_steps: 1
"""
    )
    done = run(
        "rollout", rows, "--servers", servers, "--model", tiny_model, "--in-process",
        "--num-generations", 2, "--max-output-tokens", 4, "--output", output,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(outcomes(output)) == 2


def test_a_served_model_can_be_asked_by_url(tiny_model, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    server = start("serve", "--model", tiny_model, stdout=subprocess.PIPE)
    try:
        line = server.stdout.readline()
        url = re.search(r"http://\S+/v1", line).group()
        done = run("rollout", "chain_sum", "--base-url", url, *ROLLOUT, "--output", output)
        assert done.returncode == 0, done.stderr
        assert len(outcomes(output)) == 6
    finally:
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=GENEROUS_S)
    assert server.returncode == 0, errors


def test_failed_rows_are_listed_by_class_and_make_the_exit_code_1(tiny_model, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    done = run(
        "rollout", "chain_sum", "--model", tiny_model, "--num-prompts", 2, "--in-process",
        "--param", "prompt=" + "word " * 3000 + "{question}", "--output", output,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "failed rows: 2" in done.stdout
    assert "e.g. row 0" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    records = list(read_records(output))
    assert [record.trajectory for record in records] == [None, None]
    assert all(record.failure is not None for record in records)


def test_a_usage_error_is_one_message_and_exit_code_2(tmp_path):
    done = run("rollout", "chainsum", "--model", "smollm2")
    assert done.returncode == 2
    assert done.stderr.startswith("gymrl: no benchmark is called 'chainsum'")
    assert len(done.stderr.splitlines()) == 1


def test_a_model_that_is_not_there_is_one_message(tmp_path):
    output = tmp_path / "rollouts.jsonl"
    done = run("rollout", "chain_sum", "--model", tmp_path / "nowhere", "--output", output)
    assert done.returncode == 2, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()


def test_a_model_that_does_not_load_in_its_worker_is_the_message_and_no_traceback(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    done = run("rollout", "chain_sum", "--model", tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"gymrl: model='{tmp_path}' can't be loaded" in done.stderr
    assert "Traceback" not in done.stderr


def test_overwriting_a_file_waits_until_the_run_can_start(tmp_path):
    output = tmp_path / "rollouts.jsonl"
    output.write_text("precious\n")
    done = run(
        "rollout", "chain_sum", "--model", tmp_path / "nowhere", "--output", output, "--overwrite"
    )
    assert done.returncode == 2
    assert output.read_text() == "precious\n"


def long_rollout(tiny_model, output):
    return (
        "rollout", "chain_sum", "--model", tiny_model, "--num-prompts", 400,
        "--num-generations", 4, "--max-output-tokens", 64, "--temperature", 1.0, "--workers", 2,
        "--output", output,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_an_interrupt_ends_every_process_and_leaves_a_valid_file(
    tiny_model, tmp_path, number, code
):
    output = tmp_path / "rollouts.jsonl"
    process = start(*long_rollout(tiny_model, output))
    try:
        wait_until(lambda: output.exists() and len(output.read_bytes()) > 20_000, "writing rows")
        children = descendants(process.pid)
        assert len(children) >= 3
        began = time.monotonic()
        process.send_signal(number)
        out, errors = process.communicate(timeout=GENEROUS_S)
        _, alive = psutil.wait_procs(children, timeout=ENDED_WITHIN_S)
        took = time.monotonic() - began
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code, errors
    assert alive == []
    assert took < ENDED_WITHIN_S
    assert "Traceback" not in errors
    assert f"{number.name}: ending the run" in errors
    assert "chain_sum" in out
    rows = sum(len(group.rows) for group in read_groups(output))
    assert rows > 0
    assert f"{rows} rows written" in out


def test_a_second_interrupt_ends_every_process_at_once(tiny_model, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    process = start(*long_rollout(tiny_model, output))
    try:
        wait_until(lambda: output.exists() and len(output.read_bytes()) > 2_000, "writing rows")
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        hear(process, "SIGINT: ending the run")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=ENDED_WITHIN_S)
        _, alive = psutil.wait_procs(children, timeout=ENDED_WITHIN_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert alive == []


def test_an_interrupt_while_starting_ends_every_process(tiny_model, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    process = start(*long_rollout(tiny_model, output))
    try:
        hear(process, "starting servers and workers")
        wait_until(lambda: len(descendants(process.pid)) > 0, "starting a worker")
        time.sleep(0.3)
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=GENEROUS_S)
        _, alive = psutil.wait_procs(children, timeout=ENDED_WITHIN_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    assert alive == []
    assert "Traceback" not in errors


def test_a_killed_driver_leaves_no_process_behind(tiny_model, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    process = start(*long_rollout(tiny_model, output))
    try:
        wait_until(lambda: output.exists() and len(output.read_bytes()) > 2_000, "writing rows")
        children = descendants(process.pid)
    finally:
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(children, timeout=ENDED_WITHIN_S)
    assert alive == []


def read_terminal(master, process):
    """Everything the process writes to its terminal until it ends."""
    received = b""
    end = time.monotonic() + GENEROUS_S
    while time.monotonic() < end:
        ready, _, _ = select.select([master], [], [], 0.1)
        if ready:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            received += chunk
        elif process.poll() is not None:
            break
    return received.decode(errors="replace")


def test_on_a_terminal_there_is_a_live_display_and_then_the_table(tiny_model, tmp_path):
    master, slave = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"}
    arguments = gymrl(
        "rollout", "chain_sum", "--model", tiny_model, "--num-prompts", 60,
        "--num-generations", 4, "--max-output-tokens", 64, "--temperature", 1.0,
    )  # fmt: skip
    process = subprocess.Popen(arguments, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    try:
        text = read_terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert process.returncode == 0, text
    assert "\x1b[" in text
    assert "rows in flight" in text
    assert "tokens/s" in text
    assert "task source" in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_solves_some_sums_and_not_others(tmp_path):
    output = tmp_path / "rollouts.jsonl"
    done = subprocess.run(
        gymrl(
            "rollout", "chain_sum", "--model", "smollm2", "--num-prompts", 8,
            "--num-generations", 4, "--seed", 1, "--output", output,
        ),
        capture_output=True, text=True, timeout=280, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    groups = list(read_groups(output))
    rewards = [sample.reward.total for group in groups for sample in group.trajectories]
    assert len(rewards) == 32
    assert 0.05 < sum(rewards) / len(rewards) < 0.95
    assert any(len({s.reward.total for s in group.trajectories}) > 1 for group in groups)
    checked = subprocess.run(
        gymrl("doctor", output, "--model", "smollm2"),
        capture_output=True, text=True, timeout=280, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
