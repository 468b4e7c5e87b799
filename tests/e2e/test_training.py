"""The reference trainer learns, over the whole road."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAST = 5


def start(output, *assignments, ranks=2, task=None):
    command = [sys.executable, "-m"]
    if ranks:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command += ["gymrl.recipes.grpo"]
    if task:
        command += ["--task", task]
    for assignment in (f"output={output}", "tensorboard=false", *assignments):
        command += ["--set", assignment]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout):
    with process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            output, _ = process.communicate()
            raise AssertionError(f"the run did not end in {timeout} s:\n{output[-5000:]}") from None
    assert process.returncode == 0, output[-5000:]


def lines(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def assert_learned(output):
    history = lines(output)
    rewards = [line["reward_mean"] for line in history]
    assert [line["step"] for line in history] == list(range(1, len(history) + 1))
    assert rewards[0] < 0.3
    assert sum(rewards[-LAST:]) / LAST >= 0.8
    # On-policy, the trainer and the generator agree on every sampled token.
    assert max(line["logprob_gap_max"] for line in history) < 1e-3
    assert all(line["failed_samples"] == 0 for line in history)


@pytest.mark.timeout(300)
def test_a_tiny_model_learns_to_say_words_over_the_whole_road(tmp_path):
    finish(start(tmp_path, "steps=30", "checkpoint_every=0"), 280)
    assert_learned(tmp_path)
    assert lines(tmp_path)[-1]["validation/reward_mean"] >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_it_learns_with_other_seeds_too(tmp_path, seed):
    finish(start(tmp_path, "steps=30", "checkpoint_every=0", f"seed={seed}"), 280)
    assert_learned(tmp_path)


@pytest.mark.timeout(300)
def test_a_tiny_model_learns_to_ask_a_tool_and_to_say_what_it_answered(tmp_path):
    finish(start(tmp_path, "steps=22", "checkpoint_every=0", ranks=0, task="look_up"), 280)
    assert_learned(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_it_learns_from_stale_tokens_with_sharded_parameters_over_a_restart(tmp_path):
    settings = ("parallel=fsdp2", "max_staleness=1")
    finish(start(tmp_path, *settings, "steps=12"), 140)
    finish(start(tmp_path, *settings, "steps=36"), 280)  # from the checkpoint of step 10
    history = lines(tmp_path)
    assert [line["step"] for line in history] == list(range(1, 37))
    rewards = [line["reward_mean"] for line in history]
    assert sum(rewards[-LAST:]) / LAST >= 0.8
    # Every token says which weights sampled it; those of now agree with the trainer.
    assert all(line["versioned_tokens_rate"] == 1.0 for line in history)
    assert max(line["staleness_max"] for line in history) == 1
    assert max(line["logprob_gap_max"] for line in history) < 1e-3
    assert any(line["importance_weight"] != 1.0 for line in history)
