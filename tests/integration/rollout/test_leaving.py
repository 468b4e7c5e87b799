"""Consumers that leave, reject, or run beside each other."""

import asyncio
import contextlib
import gc

import anyio
import psutil
import pytest

from gymrl.config import GenerationConfig, GymConfig, RolloutConfig
from gymrl.errors import RolloutStreamError
from gymrl.rollout.engine import RolloutEngine
from gymrl.rollout.prepare import GroupSizes
from gymrl.testing.gym_server import FakeGymServer, Fault
from gymrl.types import Failure
from tests.integration.actors.watching import until


async def all_idle(engine):
    while any(i.in_flight for i in engine.fleet.instances):  # noqa: ASYNC110  # nothing tells us
        await anyio.sleep(0.01)


async def test_leaving_after_the_first_group_ends_every_request(row):
    """THUDM/slime#2078: an early aclose() left requests and permits behind."""
    before = asyncio.all_tasks()
    script = dict.fromkeys(range(1, 40), Fault.SILENT)
    async with FakeGymServer(script) as server:
        gym = GymConfig(registry_url=server.url)
        async with RolloutEngine(RolloutConfig(gym=gym, num_workers=2)) as engine:
            quiet = len(asyncio.all_tasks())
            async with contextlib.aclosing(
                engine.stream([row("fake_agent") for _ in range(40)])
            ) as stream:
                assert (await anext(stream)).index == 0
                await server.wait_for_requests(40)
            with anyio.fail_after(30):
                await server.wait_until_idle()
                await all_idle(engine)
            assert server.disconnects == 39
            assert not [t for t in asyncio.all_tasks() if "merge" in t.get_name()]
            # The fake server's own tasks, one a connection, end in their time.
            await until(lambda: len(asyncio.all_tasks()) <= quiet + 1)
            with anyio.fail_after(40):
                assert len(await engine.run([row("fake_agent")])) == 1
    gc.collect()
    await until(lambda: asyncio.all_tasks() == before)


async def test_a_consumer_that_is_cancelled_ends_every_request(row):
    async with FakeGymServer(dict.fromkeys(range(8), Fault.SILENT)) as server:
        gym = GymConfig(registry_url=server.url)
        async with RolloutEngine(RolloutConfig(gym=gym)) as engine:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.run, [row("fake_agent") for _ in range(8)])
                await server.wait_for_requests(8)
                tasks.cancel_scope.cancel()
            with anyio.fail_after(30):
                await server.wait_until_idle()
            assert server.disconnects == 8


async def test_rows_that_wait_for_another_attempt_leave_nothing_behind(make_engine, row):
    async with make_engine(num_workers=2) as engine:
        rows = [row(), row(fail_times=9, kind="infra", error="GymTransportError")]
        async with contextlib.aclosing(engine.stream(rows)) as stream:
            await anext(stream)
        assert not any(t.get_name().startswith("merge") for t in asyncio.all_tasks())


async def test_a_stream_beside_one_that_fails_goes_on(make_engine, row):
    async with make_engine(num_workers=2) as engine:
        outcome = {}

        async def train():
            try:
                await engine.run([row(), row(delay=0.2, fail_times=9), row(delay=60)])
            except RolloutStreamError as error:
                outcome["training"] = error

        async def validate():
            outcome["validation"] = await engine.run([row(delay=0.5) for _ in range(6)])

        with anyio.fail_after(40):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(train)
                tasks.start_soon(validate)
        assert outcome["training"].row == 1
        assert [group.index for group in outcome["validation"]] == list(range(6))
        with anyio.fail_after(30):
            await all_idle(engine)


async def test_each_of_two_streams_has_counters_of_its_own(make_engine, row):
    async with make_engine(failure_policy="mask") as engine:
        one, other = engine.stream([row(), row(fail_times=9)]), engine.stream([row()])
        async for _ in one:
            pass
        async for _ in other:
            pass
        assert (one.progress.rows_done, one.progress.rows_failed) == (1, 1)
        assert (other.progress.rows_done, other.progress.rows_failed) == (1, 0)
        assert one.progress.timings
        assert other.progress.timings
        assert (engine.progress.rows_done, engine.progress.rows_failed) == (2, 1)
        assert engine.progress.timings == other.progress.timings


async def test_the_timings_reach_the_consumer_though_the_last_group_is_dropped(make_engine, row):
    rows = [row(), row(delay=0.2, fail_times=9)]
    async with make_engine(failure_policy="drop_group") as engine:
        stream = engine.stream(rows)
        groups = [group async for group in stream]
    assert [(group.index, group.timings) for group in groups] == [(0, None)]
    assert stream.progress.timings["timing/rollout/run_rollouts"] == 0.2
    assert stream.progress.metrics()["rollout_failures/NoGenerationError"] == 1.0


@pytest.mark.parametrize("policy", ["raise", "mask"])
async def test_a_rejected_row_is_counted_and_its_group_ends(make_engine, row, policy):
    """areal-project/AReaL#588: a rejected rollout was waited for without end."""
    asked = []

    def accept(result):
        asked.append(result.index)
        return result.outcome.reward.total > 0.2

    engine = make_engine(failure_policy=policy, max_data_attempts=3, accept=accept)
    async with engine:
        rows = [row(), row(reward=0.1), row(), row()]
        with anyio.fail_after(40):
            (group,) = [g async for g in engine.stream_repeated(rows, GroupSizes(group=4))]
    assert sorted(asked) == [0, 1, 2, 3]
    assert [isinstance(sample, Failure) for sample in group.samples] == [False, True, False, False]
    assert (group.failures[0].error, group.failures[0].row) == ("RowRejected", 1)
    assert group.metrics["total_reward/mean"] == 1.0
    assert group.metrics["rollout_failures/RowRejected"] == 1.0
    assert (engine.progress.rows_rejected, engine.progress.redispatches) == (1, 0)


async def test_a_group_with_a_rejected_row_is_dropped_under_that_policy(make_engine, row):
    async with make_engine(failure_policy="drop_group", accept=lambda result: False) as engine:
        assert await engine.run([row(), row()]) == []
        assert engine.progress.groups_dropped == 2


async def test_what_the_acceptance_raises_ends_the_run(make_engine, row):
    def accept(result):
        raise ZeroDivisionError("mine")

    async with make_engine(accept=accept) as engine:
        with pytest.raises(ZeroDivisionError, match="mine"):
            await engine.run([row()])
        with anyio.fail_after(30):
            await all_idle(engine)


async def accept_later(result):
    return True


def forget_to_say(result):
    pass


@pytest.mark.parametrize("accept", [accept_later, forget_to_say])
async def test_an_acceptance_that_says_neither_yes_nor_no_is_not_taken_for_one(
    make_engine, row, accept
):
    async with make_engine(accept=accept, in_process=True) as engine:
        with pytest.raises(TypeError, match="must say True or False, at once"):
            await engine.run([row()])


async def test_entering_an_open_engine_leaves_its_counters(make_engine, row):
    async with make_engine(in_process=True) as engine:
        await engine.run([row()])
        with pytest.raises(RuntimeError, match="open already"):
            await engine.__aenter__()
        assert engine.progress.rows_done == 1


async def test_an_exit_that_is_cancelled_by_asyncio_itself_leaves_no_process(make_engine):
    """``asyncio.timeout``, ``wait_for`` and Ctrl-C pass through a shielded scope."""
    pids = []

    async def leave_in_no_time():
        async with (
            asyncio.timeout(None) as limit,
            make_engine(num_workers=2, generation=GenerationConfig(model="tiny")) as engine,
        ):
            pids.extend(instance.pid for instance in engine.fleet.instances)
            limit.reschedule(asyncio.get_running_loop().time() + 0.001)

    with pytest.raises(TimeoutError):
        await leave_in_no_time()
    assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)
