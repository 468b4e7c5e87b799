"""An evaluation of two shipped benchmarks as a user runs it, killed on the way and continued."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from gymrl.evaluation import read_evaluation
from gymrl.records import read_records
from gymrl.testing.models import build_tiny_model

# Each run starts an interpreter with a model; a busy machine gets time for that.
pytestmark = pytest.mark.timeout(240)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
GENEROUS_S = 90.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


def gymrl(*arguments):
    return [sys.executable, "-m", "gymrl", *map(str, arguments)]


def run(*arguments):
    done = subprocess.run(
        gymrl(*arguments),
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def rows_in(path):
    return path.read_bytes().count(b'"record":"row"') if path.exists() else 0


def kill_when(process, condition):
    end = time.monotonic() + GENEROUS_S
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.005)
    process.kill()
    process.wait(GENEROUS_S)
    process.stderr.close()


def results(directory):
    """What a run gave, by row, in an order of its own."""
    return {
        (record.benchmark, record.task_id, record.rollout_index): (
            record.trajectory.token_ids,
            record.trajectory.reward.total,
        )
        for record in read_records(directory / "rollouts.jsonl")
    }


def test_a_run_that_was_killed_and_continued_reports_what_an_unbroken_one_does(model, tmp_path):
    plan, whole, broken = tmp_path / "plan.json", tmp_path / "whole", tmp_path / "broken"
    run(
        "eval", "plan", "chain_sum", "tool_arithmetic", "--repeats", 4,
        "--overrides", "num_tasks=4", "--max-output-tokens", 12, "--model", model, "-o", plan,
    )  # fmt: skip
    arguments = ("--batch-size", 1, "--in-process", "--output")
    done = run("eval", "run", plan, *arguments, whole)
    assert "chain_sum" in done.stdout
    assert "pass@k" in done.stdout
    assert "rows 32/32" in done.stderr

    moments = random.Random(time.time_ns())
    first, second = sorted(moments.sample(range(2, 28), 2))
    rollouts = broken / "rollouts.jsonl"
    for enough in (first, second):
        process = subprocess.Popen(
            gymrl("eval", "run", plan, *arguments, broken),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        kill_when(process, lambda at_least=enough: rows_in(rollouts) >= at_least)
        assert process.returncode == -signal.SIGKILL
        assert enough <= rows_in(rollouts) < 32
    # What a kill in the middle of a write would leave.
    whole_file = rollouts.read_bytes()
    torn = whole_file[: -moments.randrange(2, 200)]
    rollouts.write_bytes(torn)

    done = run("eval", "run", *arguments, broken)  # the directory knows its plan
    assert "torn" in done.stderr
    assert "from before)" in done.stderr
    assert results(broken) == results(whole)
    metrics = [json.loads((d / "benchmark_metrics.json").read_text()) for d in (whole, broken)]
    assert metrics[0] == metrics[1]
    assert metrics[0]["complete"]
    evaluation = read_evaluation(broken)
    assert (evaluation.duplicates, evaluation.foreign) == (0, 0)

    compared = run("eval", "report", whole, broken, "--plots", tmp_path / "plots")
    assert compared.stdout.count("+0.000") == 2
    assert len(list((tmp_path / "plots").glob("*.png"))) == 2
    page = run("eval", "report", broken, "--format", "markdown").stdout
    assert "| tool_arithmetic | 4 | 4 | 16 of 16 | 0 | 0 |" in page
