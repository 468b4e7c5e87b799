"""A run that is killed at random places, in every way, ends as an unbroken one does: bit for bit."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from gymrl.recipes import checkpoint

ROOT = Path(__file__).parents[2]
STEPS = 8
SETTINGS = (
    f"steps={STEPS}",
    "checkpoint_every=3",
    "validate_every=3",
    "num_generations=4",
    # Tokens are then the same whatever else is generated at the time.
    "max_batch_size=1",
    "tensorboard=false",
)
GENERATOR, EVERYTHING = "generator", "everything"
KINDS = ("rank 0", "rank 1", EVERYTHING)
"""Torchrun starts the ranks again, the engine a generator; after everything, we the launcher."""

MEASURED = ("seconds", "timing/", "share/", "redispatches")
"""What is in the names of metrics that differ from run to run."""


@contextlib.contextmanager
def launched(output):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=3", "-m", "gymrl.recipes.grpo"]
    for assignment in (f"output={output}", *SETTINGS):
        command += ["--set", assignment]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (
        output.with_suffix(".log").open("ab") as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()  # the launcher ends its ranks
            process.wait()


def said(output):
    return output.with_suffix(".log").read_text(errors="replace")[-6000:]


def lines(output):
    path = output / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def victims(launcher, kind):
    """The processes to kill; none while they are not there yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        everything = psutil.Process(launcher.pid).children(recursive=True)
        if kind == EVERYTHING:
            return [psutil.Process(launcher.pid), *everything]
        return [process for process in everything if is_of(process, kind)]
    return []


def is_of(process, kind):
    with contextlib.suppress(psutil.Error):
        if kind == GENERATOR:
            return any('"generator 0/0"' in part for part in process.cmdline())
        is_rank = "gymrl.recipes.grpo" in process.cmdline()
        return is_rank and f"rank {process.environ().get('RANK')}" == kind
    return False


def kill(launcher, output, kind, step, delay_s):
    """When so many steps are done and a while has passed; whether the run was still at work.

    On a busy machine it may be over before.
    """
    ends = time.monotonic() + 120
    while launcher.poll() is None:
        assert time.monotonic() < ends, f"no {kind} after step {step}:\n{said(output)}"
        if len(lines(output)) < step or not victims(launcher, kind):
            time.sleep(0.02)
            continue
        time.sleep(delay_s)
        # One that was there may have just ended, with the one that was killed before it.
        if found := victims(launcher, kind):
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            return True
    assert launcher.returncode == 0, said(output)
    return False


def finish(launcher, output):
    try:
        assert launcher.wait(timeout=150) == 0, said(output)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the run did not end:\n{said(output)}") from None


def run_with_kills(output, draw, num_starts):
    """Kill a generator and, so many times, what makes a new start necessary; how often that was done."""
    kinds = [GENERATOR, *draw.sample(KINDS, num_starts)]
    draw.shuffle(kinds)
    steps = sorted(draw.choices(range(1, 6), k=len(kinds)))
    done = 0
    waiting = list(zip(kinds, steps, (draw.uniform(0, 0.3) for _ in kinds), strict=True))
    sys.stdout.write(f"killed: {waiting}\n")  # shown where the test fails
    while waiting:
        with launched(output) as launcher:
            while waiting:
                kind, step, delay_s = waiting.pop(0)
                done += kill(launcher, output, kind, step, delay_s)
                if kind == EVERYTHING:
                    break
            else:
                finish(launcher, output)
    if len(lines(output)) < STEPS:
        with launched(output) as launcher:
            finish(launcher, output)
    return done


def final_state(output):
    path = checkpoint.latest(output)
    assert path is not None, said(output)
    assert path.name == f"step_{STEPS:08d}.pt"
    return torch.load(path, weights_only=True)


def flat(state, path=()):
    if isinstance(state, dict):
        return {k: v for key, inner in state.items() for k, v in flat(inner, (*path, key)).items()}
    return {path: state}


def is_same(ours, theirs):
    if torch.is_tensor(theirs):
        return torch.equal(ours, theirs)
    # Loading makes lists of some tuples.
    return json.dumps(ours) == json.dumps(theirs)


def decisive(output):
    return [
        {name: value for name, value in line.items() if not any(part in name for part in MEASURED)}
        for line in lines(output)
    ]


@pytest.mark.timeout(500)
def test_a_run_killed_at_random_places_ends_with_the_parameters_of_an_unbroken_one(tmp_path):
    seed = int(os.environ.get("GYMRL_KILL_SEED", random.SystemRandom().randrange(10**6)))
    sys.stdout.write(f"GYMRL_KILL_SEED={seed} repeats this\n")
    unbroken = tmp_path / "unbroken"
    with launched(unbroken) as launcher:
        finish(launcher, unbroken)
    draw = random.Random(seed)
    for number in range(3):
        killed = tmp_path / f"killed {number}"
        if run_with_kills(killed, draw, num_starts=2) == 3:
            break
    else:
        raise AssertionError("the run was over each time before it was killed")
    assert [line["step"] for line in lines(killed)] == list(range(1, STEPS + 1))
    assert decisive(killed) == decisive(unbroken)
    ours, theirs = flat(final_state(killed)), flat(final_state(unbroken))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert is_same(ours[name], value), name
