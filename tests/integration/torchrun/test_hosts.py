"""Several hosts: work goes to all; a host that dies, is cut off or has another secret is found."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from benchmarks.nodes.hosts import hosts, why_not
from gymrl.recipes.say_word import build_word_model

REASON = why_not()
# Where the gates run, a machine that can't make hosts fails; elsewhere these tests are left out.
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(REASON is not None and os.environ.get("CI") != "true", reason=str(REASON)),
]
JOB = str(Path(__file__).parent / "job.py")


class Running:
    """A job on several hosts, and what each rank has said so far."""

    def __init__(self, made, directory, stack):
        self.hosts = made
        self._directory = directory
        self._stack = stack

    def start(self, name, *arguments, variables=None, of_host=None, all_speak=False):
        """With `all_speak` a rank that has said its error does not end before every other one has."""
        self.launched = []
        spoken = self._directory / "spoken"
        spoken.mkdir()
        common = {**(variables or {}), **({"SPOKEN": str(spoken)} if all_speak else {})}
        for host in self.hosts:
            streams = [
                self._stack.enter_context((self._directory / f"{kind}{host.number}").open("w"))
                for kind in ("out", "log")
            ]
            own = {**common, **(of_host or {}).get(host.number, {})}
            script = [JOB, name, *map(str, arguments)]
            self.launched.append(host.launch(len(self.hosts), script, *streams, own))

    def said(self, number):
        text = (self._directory / f"out{number}").read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def log(self, number):
        return (self._directory / f"log{number}").read_text()[-4000:]

    def until(self, number, condition, seconds=150):
        ends = time.monotonic() + seconds
        while not (found := [facts for facts in self.said(number) if condition(facts)]):
            assert time.monotonic() < ends, (self.said(number), self.log(number))
            time.sleep(0.1)
        return found[0]

    def error(self, number):
        return self.until(number, lambda facts: "error" in facts)


@pytest.fixture
def job(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(count, name, *arguments, slow=None, **keywords):
            made = stack.enter_context(hosts(count))
            for number, rate in (slow or {}).items():
                made[number].slow_down(rate)
            running = Running(made, tmp_path, stack)
            running.start(name, *arguments, **keywords)
            stack.callback(lambda: [(p.kill(), p.wait()) for p in running.launched])
            return running

        yield start


@pytest.mark.slow
@pytest.mark.parametrize(("count", "slow"), [(2, {1: "2mbit"}), (4, None)])
def test_every_host_runs_its_own_workers_also_behind_a_slow_link(job, count, slow):
    running = job(count, "collect", slow=slow, variables={"GYM_WORKERS": "1"})
    for process in running.launched:
        assert process.wait(timeout=150) == 0, [running.log(n) for n in range(count)]
    steps = [facts for n in range(count) for facts in running.said(n) if "groups" in facts]
    assert len({pid for facts in steps for pid in facts["pids"]}) == count
    first = [running.said(n)[0]["groups"] for n in range(count)]
    assert all(first)
    assert sorted(index for share in first for index in share) == [0, 1, 2, 3, 4]


def test_new_weights_reach_the_generators_of_every_host(job, tmp_path):
    running = job(2, "word_model", build_word_model(tmp_path / "model", layers=1))
    for process in running.launched:
        assert process.wait(timeout=150) == 0, [running.log(n) for n in range(2)]
    steps = [facts for n in range(2) for facts in running.said(n)]
    workers = steps[0]["workers"]
    assert [name for name in workers if "generator" in name] == ["generator 0/0", "generator 1/0"]
    # Each host's groups were sampled by its own generator, from the sharded model's new weights.
    assert max(facts["gap"] for facts in steps) < 1e-3
    assert {facts["version"] for facts in steps if facts["killed"]} == {2}


def test_a_host_that_dies_ends_the_job_everywhere(job):
    running = job(2, "endless", variables={"HEARTBEAT_S": "6"})
    running.until(0, lambda facts: facts.get("ready") == 3)
    running.hosts[1].kill()
    error = running.error(0)
    assert error["error"] in ("RankFailedError", "RolloutStreamError", "ActorDiedError")
    assert "node 1 (10.203.0.2)" in error["text"] or "rank 1" in error["text"]


def test_a_host_that_is_cut_off_is_found_on_both_sides(job):
    running = job(2, "endless", variables={"HEARTBEAT_S": "6"})
    running.until(0, lambda facts: facts.get("ready") == 3)
    running.hosts[1].unplug()
    here, there = running.error(0), running.error(1)
    assert "node 1 (10.203.0.2)" in here["text"] or "rank 1" in here["text"]
    assert there["error"] == "RankFailedError"
    assert "rank 0" in there["text"]


def test_a_host_with_another_secret_is_refused(job):
    running = job(
        2,
        "collect",
        all_speak=True,
        of_host={0: {"GYMRL_SECRET": "one" * 8}, 1: {"GYMRL_SECRET": "other" * 8}},
    )
    assert running.error(0)["error"] == "AuthenticationError"
    assert running.error(1)["cause"] == "AuthenticationError"


def test_a_worker_that_dies_on_another_host_is_told_of_with_its_exit_code(job):
    running = job(2, "worker_dies", all_speak=True, variables={"DIE_ROW": "1"})
    error = running.error(0)
    assert error["error"] == "RolloutStreamError", (error, running.error(1), running.log(1))
    assert "exit code 3" in error["text"]
    assert "node 1 (10.203.0.2)" in error["text"]
    assert running.error(1)["cause"] == "RolloutStreamError"


def test_a_row_that_kills_workers_fails_alone_and_its_host_goes_on(job):
    running = job(2, "poison_row")
    for process in running.launched:
        assert process.wait(timeout=150) == 0, [running.log(n) for n in range(2)]
    first = [running.said(n)[0] for n in range(2)]
    assert [error for facts in first for error in facts["failed"]] == ["PoisonError"]
    assert first[0]["metrics"]["samples"] == 3.0
    second = [pid for n in range(2) for pid in running.said(n)[1]["pids"]]
    assert len(set(second)) == 2
