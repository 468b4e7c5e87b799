"""Rows go in; each comes out once, as a trajectory or as a failure, whatever happens between."""

import collections
import contextlib
import gc
import logging
import os
import random
import signal

import anyio
import anyio.to_thread
import psutil
import pytest

from gymrl.config import GymConfig, RolloutConfig, ShardConfig
from gymrl.rollout.engine import RolloutEngine
from gymrl.testing.gym_server import FakeGymServer, Fault, gym_answer
from gymrl.types import Failure, Trajectory

# Eight workers start; a busy machine gets time for that.
pytestmark = pytest.mark.timeout(240)
GENEROUS_S = 150

GOOD = gym_answer([([1, 2, 3], [4, 5])])
AGENTS = ("algebra", "geometry", "logic", "code")
NUM_ROWS = 512
GROUP = 4
SHARE = 0.05

# Faults of the fleet pass; a row's own stay with it. Two of those that look bad are harmless.
OF_THE_FLEET = {
    Fault.HTTP_408,
    Fault.HTTP_429,
    Fault.HTTP_500,
    Fault.HTTP_503_RETRY_AFTER,
    Fault.HTTP_504,
    Fault.CLOSED_AFTER_ACCEPT,
    Fault.SILENT,
    Fault.STALLED_BODY,
    Fault.SHORT_BODY,
}
HARMLESS = {Fault.LONE_SURROGATE, Fault.HUGE_INTEGER}
OF_THE_ROW = set(Fault) - OF_THE_FLEET - HARMLESS


def faulty_rows():
    """Five in a hundred rows go wrong, each kind of fault at least once."""
    kinds = list(Fault)
    count = max(len(kinds), round(SHARE * NUM_ROWS))
    rows = random.Random(7).sample(range(NUM_ROWS), count)
    return {row: kinds[place % len(kinds)] for place, row in enumerate(rows)}


def script_of(faults):
    return {row: [fault, GOOD] if fault in OF_THE_FLEET else fault for row, fault in faults.items()}


@pytest.fixture
def dataset():
    """128 prompts; four in a row go to the four shards."""
    return [
        {
            "responses_create_params": {"input": f"question {n}"},
            "agent_ref": {"name": AGENTS[n % len(AGENTS)]},
            "answer": n,
        }
        for n in range(NUM_ROWS // GROUP)
    ]


@contextlib.asynccontextmanager
async def open_fleet(faults, row_timeout_s=6.0, **settings):
    """Four agents on servers of their own, and an engine with eight worker processes."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(FakeGymServer(script_of(faults), agents=(agent,)))
            for agent in AGENTS
        ]
        blocks = {}
        for agent, server in zip(AGENTS, servers, strict=True):
            port = int(server.url.rpartition(":")[2])
            address = {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}
            blocks[agent] = {"responses_api_agents": {"fake": address}}
        gym = GymConfig(
            servers=blocks,
            base_urls=(f"{servers[0].url}/v1",),
            row_timeout_s=row_timeout_s,
            decode_text=False,
        )
        shards = {agent: ShardConfig(servers=(agent,), replicas=2) for agent in AGENTS}
        config = RolloutConfig(gym=gym, shards=shards, seed=1, **settings)
        yield servers, await stack.enter_async_context(RolloutEngine(config))


def outcomes_of(groups):
    """Every row's outcome; a row that came twice fails the test."""
    outcomes = {}
    for group in groups:
        for row, sample in zip(group.rows, group.samples, strict=True):
            assert row.index not in outcomes
            outcomes[row.index] = sample
    return outcomes


async def test_every_row_is_accounted_for_exactly_once(dataset, caplog):
    faults = faulty_rows()
    assert set(faults.values()) == set(Fault)
    # A row that takes so long for no fault of its own would be asked for twice, and is counted.
    settings = {"row_timeout_s": 15.0, "no_progress_timeout_s": 100, "failure_policy": "mask"}
    with caplog.at_level(logging.ERROR):
        async with open_fleet(faults, **settings) as opened:
            servers, engine = opened
            pids = {instance.pid for instance in engine.fleet.instances}
            assert len(pids) == 8
            assert os.getpid() not in pids
            stream = engine.stream(dataset, num_generations=GROUP)
            with anyio.fail_after(GENEROUS_S):
                groups = [group async for group in stream]
            progress = engine.progress
            requests = sum((server.requests for server in servers), collections.Counter())
    assert sorted(group.index for group in groups) == list(range(128))
    outcomes = outcomes_of(groups)
    assert sorted(outcomes) == list(range(NUM_ROWS))
    own = {row for row, fault in faults.items() if fault in OF_THE_ROW}
    assert {row for row, outcome in outcomes.items() if isinstance(outcome, Failure)} == own
    for row in own:
        failure = outcomes[row]
        assert (failure.row, failure.kind, failure.attempts) == (row, "data", 2)
        assert failure.agent == AGENTS[row // GROUP % 4]
        assert failure.instance.startswith(f"{failure.agent}/")
        assert failure.traceback
    for row in outcomes.keys() - own:
        assert outcomes[row].token_ids.tolist() == [1, 2, 3, 4, 5]
        assert outcomes[row].agent == AGENTS[row // GROUP % 4]
    # What the servers saw: one request a row, and one more where something went wrong.
    twice = own | {row for row, fault in faults.items() if fault in OF_THE_FLEET}
    assert {row for row, count in requests.items() if count == 1} >= outcomes.keys() - twice - own
    assert all(requests[row] == 2 for row in own)
    assert all(requests[row] >= 2 for row in twice)
    assert (progress.rows, progress.rows_done) == (NUM_ROWS, NUM_ROWS - len(own))
    assert progress.rows_failed == sum(progress.failures.values()) == len(own)
    assert progress.redispatches == requests.total() - NUM_ROWS
    labels = {f"{agent}/{n}" for agent in AGENTS for n in (0, 1)}
    reported = {name.split("/shard/")[1] for name in progress.timings if "/shard/" in name}
    assert {name.rpartition("/")[0] for name in reported} == labels
    assert groups[-1].timings == progress.timings
    assert "never retrieved" not in caplog.text


async def test_every_row_is_accounted_for_though_workers_are_killed(dataset):
    faults = faulty_rows()
    before = set(psutil.Process().children(recursive=True))
    async with open_fleet(faults, failure_policy="mask", no_progress_timeout_s=100) as opened:
        _, engine = opened
        instances = engine.fleet.instances
        stream = engine.stream(dataset, num_generations=GROUP)
        groups = [await anext(stream)]
        for instance in (instances[0], instances[3], instances[6]):
            os.kill(instance.pid, signal.SIGKILL)
        with anyio.fail_after(GENEROUS_S):
            groups += [group async for group in stream]
        assert sum(instance.deaths for instance in instances) == 3
        await engine.health_check()
    outcomes = outcomes_of(groups)
    assert sorted(outcomes) == list(range(NUM_ROWS))
    own = {row for row, fault in faults.items() if fault in OF_THE_ROW}
    assert {row for row, outcome in outcomes.items() if isinstance(outcome, Failure)} == own
    gc.collect()
    left = set(psutil.Process().children(recursive=True)) - before
    _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(left, timeout=30))
    assert alive == []


async def test_dropped_groups_are_counted_and_no_row_is_lost(dataset):
    faults = faulty_rows()
    own = {row for row, fault in faults.items() if fault in OF_THE_ROW}
    bad_groups = {row // GROUP for row in own}
    async with open_fleet(faults, failure_policy="drop_group", no_progress_timeout_s=100) as opened:
        _, engine = opened
        stream = engine.stream(dataset, num_generations=GROUP)
        with anyio.fail_after(GENEROUS_S):
            groups = [group async for group in stream]
    assert {group.index for group in groups} == set(range(128)) - bad_groups
    assert all(isinstance(sample, Trajectory) for group in groups for sample in group.samples)
    progress = stream.progress
    assert progress.groups_done + progress.groups_dropped == progress.groups == 128
    assert progress.rows_done + progress.rows_failed == NUM_ROWS
    assert progress.groups_dropped == len(bad_groups)
    assert progress.timings["timing/rollout/total"] > 0
