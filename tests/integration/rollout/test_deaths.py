"""Worker processes that die in the middle of a run."""

import gc
import json
import os
import signal

import anyio
import pytest

from gymrl.actors import RestartPolicy
from gymrl.errors import ActorDiedError, RolloutRedispatchExhausted, RolloutStreamError
from gymrl.rollout.prepare import GroupSizes
from gymrl.types import Failure, Trajectory
from tests.integration.actors.watching import until

ALWAYS = 99


def pids_of(engine):
    return [instance.pid for instance in engine.fleet.instances]


def facts(sample):
    return json.loads(sample.result)


async def kill_all(engine):
    for pid in pids_of(engine):
        os.kill(pid, signal.SIGKILL)


async def test_what_a_dead_worker_had_under_way_is_done_elsewhere(make_engine, row, log):
    async with make_engine(num_workers=2, seed=3) as engine:
        rows = [row(delay=0.3) for _ in range(8)]
        rows[1] = row(delay=0.1, die_times=1)
        with anyio.fail_after(30):
            groups = await engine.run(rows)
            fresh = await engine.run([row(delay=0.0) for _ in range(8)])
        assert [group.index for group in groups] == list(range(8))
        assert all(isinstance(sample, Trajectory) for g in groups for sample in g.samples)
        assert engine.progress.redispatches == 4, "the rows of the dead worker, each once"
        assert sum(instance.deaths for instance in engine.fleet.instances) == 1
    assert [facts(g.samples[0])["seed"] for g in groups] == [
        facts(g.samples[0])["seed"] for g in fresh
    ]
    ids = [facts(group.samples[0])["id"] for group in groups]
    assert ids == [group.rows[0].rollout_id for group in groups]
    assert [i for i, rollout_id in enumerate(ids) if rollout_id.endswith(".1")] == [1, 3, 5, 7]
    assert len({facts(group.samples[0])["pid"] for group in groups}) == 1


async def test_the_only_worker_is_started_again_with_set_up_and_servers(make_engine, row, log):
    async with make_engine() as engine:
        with anyio.fail_after(30):
            groups = await engine.run([row(delay=0.2), row(delay=0.1, die_times=1)])
            await engine.health_check()
        assert len(groups) == 2
    events = log.read_text()
    assert (events.count("setup"), events.count("spin_up")) == (2, 2)


async def test_a_group_moves_as_a_whole(make_engine, row):
    async with make_engine(num_workers=2) as engine:
        rows = [row(delay=0.2), row(delay=0.1, die_times=1), row(delay=0.3)] + [row()] * 3
        with anyio.fail_after(30):
            groups = [g async for g in engine.stream_repeated(rows, GroupSizes(group=3))]
    homes = [{facts(sample)["pid"] for sample in group.samples} for group in groups]
    assert [len(home) for home in homes] == [1, 1]
    assert homes[0] == homes[1], "the dead worker's group went to the other replica"


async def test_a_row_that_kills_its_worker_again_and_again_fails_alone(make_engine, row):
    rows = [row(delay=0.3) for _ in range(12)]
    rows[5] = row(delay=0.05, die_times=ALWAYS)
    async with make_engine(num_workers=2, failure_policy="mask") as engine:
        with anyio.fail_after(50):
            groups = await engine.run(rows)
        assert engine.progress.failures == {"PoisonError": 1}
        await engine.health_check()
    failures = [sample for group in groups for sample in group.failures]
    assert len(groups) == 12
    (failure,) = failures
    assert (failure.row, failure.error, failure.kind) == (5, "PoisonError", "data")
    assert "at the last one alone" in failure.message
    assert "the worker's last words" in failure.message
    assert failure.fields["signal"] == 9
    assert failure.fields["deaths"] <= 5
    assert sum(len(group.trajectories) for group in groups) == 11


async def test_a_poisonous_row_ends_the_run_under_the_policy_raise(make_engine, row):
    async with make_engine() as engine:
        with anyio.fail_after(30):
            with pytest.raises(RolloutStreamError, match=r"row 0 .*PoisonError") as caught:
                await engine.run([row(die_times=ALWAYS)])
    assert caught.value.row == 0
    assert "killed by SIGKILL" in str(caught.value)


async def test_the_group_of_a_poisonous_row_does_not_wait_for_slower_ones(make_engine, row):
    rows = [row(delay=0.1, die_times=ALWAYS), row(delay=60)]
    async with make_engine(num_workers=2, failure_policy="mask") as engine:
        stream = engine.stream(rows)
        with anyio.fail_after(40):
            group = await anext(stream)
        await stream.aclose()
    assert group.index == 0
    assert isinstance(group.samples[0], Failure)


async def test_deaths_are_attempts_and_a_spent_budget_ends_the_run(make_engine, row):
    async with make_engine(max_infra_attempts=2, failure_policy="mask") as engine:
        with anyio.fail_after(30):
            with pytest.raises(RolloutRedispatchExhausted, match="failed 2 times") as caught:
                await engine.run([row(die_times=ALWAYS)])
    assert "ActorDiedError" in str(caught.value)
    assert (caught.value.row, caught.value.attempts) == (0, 2)


async def test_without_restarts_a_kill_of_every_worker_ends_the_run_with_how_they_died(
    make_engine, row
):
    """NVIDIA-NeMo/RL#3488: a dead collector, and a trainer that polls an empty buffer for hours."""
    async with make_engine(num_workers=2, worker_restarts=0) as engine:
        stream = engine.stream([row(), row(delay=0.1), row(delay=60), row(delay=60)])
        assert {(await anext(stream)).index, (await anext(stream)).index} == {0, 1}
        await kill_all(engine)
        with pytest.raises(RolloutStreamError, match=r"instance 'default/[01]' failed") as caught:
            with anyio.fail_after(30):
                await anext(stream)
        with pytest.raises(RolloutStreamError, match="instance 'default/"):
            await engine.run([row()])
    cause = caught.value.__cause__
    assert isinstance(cause, ActorDiedError)
    assert (cause.signal, cause.exit_code) == (9, None)


async def test_the_last_lines_of_a_worker_that_is_lost_are_in_the_error(make_engine, row):
    async with make_engine(worker_restarts=0) as engine:
        with anyio.fail_after(30):
            with pytest.raises(RolloutStreamError, match="worker's last words") as caught:
                await engine.run([row(delay=0.1, die_times=1)])
    assert caught.value.instance == "default"
    assert "the worker's last words" in caught.value.__cause__.stderr


async def test_a_kill_of_every_worker_costs_one_restart_and_the_run_goes_on(make_engine, row):
    policy = RestartPolicy(restarts=1, correlation_s=60)
    async with make_engine(num_workers=3, policy=policy) as engine:
        stream = engine.stream([row(delay=0.5 * n) for n in range(9)])
        groups = [await anext(stream)]
        await kill_all(engine)
        with anyio.fail_after(40):
            groups += [group async for group in stream]
        assert sorted(group.index for group in groups) == list(range(9))
        assert sum(instance.deaths for instance in engine.fleet.instances) == 3


async def test_a_fleet_that_dies_whenever_it_runs_again_ends_the_run(make_engine, row):
    async with make_engine(num_workers=2, worker_restarts=2) as engine:
        failed = []

        async def consume():
            try:
                await engine.run([row(delay=60) for _ in range(8)])
            except RolloutStreamError as error:
                failed.append(error)

        async def reap():
            while not failed:
                for instance in engine.fleet.instances:
                    if instance.is_ready and instance.in_flight:
                        instance.kill()
                await anyio.sleep(0.1)

        with anyio.fail_after(45):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume)
                tasks.start_soon(reap)
        assert "failed: ActorDiedError" in str(failed[0])
        assert failed[0].instance.startswith("default/")


async def test_the_death_of_a_worker_is_seen_by_every_stream_over_it(make_engine, row, log):
    async with make_engine(failure_policy="mask") as engine:
        results = {}

        async def consume(name, rows):
            results[name] = await engine.run(rows)

        with anyio.fail_after(40):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume, "training", [row(delay=0.4) for _ in range(4)])
                tasks.start_soon(consume, "validation", [row(delay=0.4) for _ in range(3)])
                await until(lambda: log.read_text().count("run") == 2)
                await kill_all(engine)
    assert [len(results["training"]), len(results["validation"])] == [4, 3]
    assert all(not g.failures for groups in results.values() for g in groups)


async def test_a_worker_that_dies_between_two_runs_is_there_for_the_second(make_engine, row):
    async with make_engine() as engine:
        await engine.run([row()])
        await kill_all(engine)
        with anyio.fail_after(30):
            assert len(await engine.run([row(), row()])) == 2


async def test_nothing_is_left_of_all_this(make_engine, row, caplog):
    async with make_engine(num_workers=2, failure_policy="mask") as engine:
        await engine.run([row(delay=0.1, die_times=1), row(delay=0.2)])
    gc.collect()
    assert "never retrieved" not in caplog.text
