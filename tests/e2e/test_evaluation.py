"""An evaluation of two shipped benchmarks as a user runs it, killed on the way and continued."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import anyio
import pytest

from gymrl.evaluation import (
    EvaluationSettings,
    PolicySettings,
    RunOptions,
    SamplingSettings,
    compare,
    plan_evaluation,
    read_evaluation,
    run_evaluation,
)
from gymrl.records import read_groups, read_records
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


def start(*arguments):
    return subprocess.Popen(
        gymrl(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT
    )


def end(process, condition=lambda: True):
    """Kill a process once a condition holds; whether it was still at work."""
    limit = time.monotonic() + GENEROUS_S
    while not condition():
        assert process.poll() in (None, 0), process.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.005)
    process.kill()
    process.wait(GENEROUS_S)
    process.stderr.close()
    return process.returncode == -signal.SIGKILL


def break_off_twice(directory, moments, start_run):
    """Kill a run somewhere, and its continuation with some rows more; whether rows were left to do.

    On a busy machine a run may be over before it is killed.
    """
    rollouts = directory / "rollouts.jsonl"
    startup = start_run(directory)
    time.sleep(moments.uniform(0.3, 2.5))  # wherever that is: imports, the model, the first rows
    if not end(startup) or rows_in(rollouts) >= 24:
        return False
    enough = moments.randint(rows_in(rollouts) + 1, 24)
    return end(start_run(directory), lambda: rows_in(rollouts) >= enough) and rows_in(rollouts) < 32


def tear(path, moments):
    """What a kill in the middle of a write would leave: a line without its end."""
    torn = path.read_bytes()[: -moments.randrange(2, 200)]
    path.write_bytes(torn[:-2] if torn.endswith(b"\n") else torn)


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
    plan, whole = tmp_path / "plan.json", tmp_path / "whole"
    settings = EvaluationSettings(
        policy=PolicySettings(model=model), sampling=SamplingSettings(max_output_tokens=12)
    )
    planned = plan_evaluation(
        ["chain_sum", "tool_arithmetic"], settings, repeats=4, overrides={"num_tasks": 4}
    )
    plan.write_text(planned.to_json())
    options = RunOptions(batch_size=1, in_process=True, num_threads=1)
    report = anyio.run(run_evaluation, planned, whole, options)
    assert report.complete

    moments = random.Random(time.time_ns())
    arguments = ("--batch-size", 1, "--in-process", "--output")

    def start_run(directory):
        return start("eval", "run", plan, *arguments, directory)

    tries = (tmp_path / f"broken {number}" for number in range(5))
    broken = next(
        directory for directory in tries if break_off_twice(directory, moments, start_run)
    )
    rollouts = broken / "rollouts.jsonl"
    assert rows_in(rollouts) > 0
    tear(rollouts, moments)

    done = run("eval", "run", *arguments, broken)  # the directory knows its plan
    assert "torn" in done.stderr
    assert "tool_arithmetic" in done.stdout
    assert "pass@k" in done.stdout
    assert results(broken) == results(whole)
    metrics = [json.loads((d / "benchmark_metrics.json").read_text()) for d in (whole, broken)]
    assert metrics[0] == metrics[1]
    assert metrics[0]["complete"]
    evaluation = read_evaluation(broken)
    assert (evaluation.duplicates, evaluation.foreign) == (0, 0)
    compared = compare(read_evaluation(whole), evaluation)
    assert [found.total.same for found in compared.benchmarks.values()] == [4, 4]
    groups = list(read_groups(rollouts))
    assert sorted(group.index for group in groups) == list(range(8))
    assert {len(group.trajectories) for group in groups} == {4}
    assert "32" in run("doctor", broken, "--model", model).stdout
