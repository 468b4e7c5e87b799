"""A group that does not end: its rows are timeouts, its siblings are not held up."""

import contextlib

import anyio
import pytest

from gymrl.config import GymConfig, RolloutConfig
from gymrl.errors import RolloutStreamError, RolloutTimeout
from gymrl.rollout.engine import RolloutEngine
from gymrl.rollout.prepare import GroupSizes
from gymrl.testing.gym_server import FakeGymServer, Fault


@pytest.fixture
def straggling(row):
    """Three groups of two; the second row of the middle one does not end."""
    return [row(), row(), row(), row(delay=60), row(delay=0.1), row(delay=0.1)]


SIZES = GroupSizes(group=2)


async def test_a_straggler_is_masked_after_the_other_groups_are_yielded(make_engine, straggling):
    """NVIDIA-NeMo/RL#3238: one straggler in a group wedged the step for ever."""
    async with make_engine(failure_policy="mask", group_timeout_s=5.0, num_workers=3) as engine:
        stream = engine.stream_repeated(straggling, SIZES)
        first = {(await anext(stream)).index, (await anext(stream)).index}
        with anyio.fail_after(40):
            late = await anext(stream)
            assert [group async for group in stream] == []
        assert first == {0, 2}
        assert engine.progress.stragglers == {"math": 1}
        for instance in engine.fleet.instances:
            assert instance.in_flight == 0, "what ran late was cancelled"
    kept, failure = late.samples
    assert kept.reward.total == 1.0
    assert (failure.error, failure.row, failure.instance) == ("RolloutTimeout", 3, "default/1")
    assert failure.message == ("row 3: its group did not end within 5 s (set by group_timeout_s)")
    assert late.metrics["rollout_stragglers/math"] == 1.0
    assert late.metrics["rollout_failures/RolloutTimeout"] == 1.0
    assert late.metrics["total_reward/mean"] == 1.0
    assert late.timings["timing/rollout/total"] >= 5.0


async def test_a_late_group_is_dropped_and_the_timings_still_arrive(make_engine, straggling):
    async with make_engine(failure_policy="drop_group", group_timeout_s=4.0) as engine:
        stream = engine.stream_repeated(straggling, SIZES)
        with anyio.fail_after(40):
            groups = [group async for group in stream]
    assert [group.index for group in groups] == [0, 2]
    assert stream.progress.groups_dropped == 1
    assert stream.progress.timings["timing/rollout/total"] >= 4.0
    assert stream.progress.metrics()["rollout_stragglers/math"] == 1.0


async def test_a_late_group_ends_the_run_after_the_others_are_yielded(make_engine, straggling):
    async with make_engine(group_timeout_s=4.0, num_workers=3) as engine:
        stream = engine.stream_repeated(straggling, SIZES)
        assert {(await anext(stream)).index, (await anext(stream)).index} == {0, 2}
        with anyio.fail_after(40):
            with pytest.raises(RolloutStreamError, match="group_timeout_s") as caught:
                await anext(stream)
    assert "row 3 (agent 'math', instance 'default/1') failed: RolloutTimeout" in str(caught.value)
    assert isinstance(caught.value.__cause__, RolloutTimeout)
    assert caught.value.__cause__.seconds == 4.0


async def test_the_consumers_own_time_makes_no_group_late(make_engine, row):
    async with make_engine(group_timeout_s=4.0, failure_policy="mask") as engine:
        async for group in engine.stream([row(), row(delay=0.3), row(delay=0.6)]):
            await anyio.sleep(2.1)
            assert not group.failures


async def test_a_row_that_waits_for_another_attempt_is_late_too(make_engine, row):
    rows = [row(fail_times=9, kind="infra", error="GymTransportError")]
    async with make_engine(group_timeout_s=4.0, retry_delay_s=0.5, failure_policy="mask") as engine:
        with anyio.fail_after(40):
            (group,) = await engine.run(rows)
    (failure,) = group.failures
    assert failure.error == "RolloutTimeout"
    assert failure.attempts >= 2


async def test_the_server_sees_a_late_row_go(row):
    async with FakeGymServer({1: Fault.SILENT, 2: Fault.STALLED_BODY}) as server:
        gym = GymConfig(registry_url=server.url)
        config = RolloutConfig(gym=gym, group_timeout_s=4.0, failure_policy="mask")
        async with RolloutEngine(config) as engine:
            with anyio.fail_after(40):
                groups = await engine.run([row("fake_agent") for _ in range(4)])
                await server.wait_until_idle()
            assert server.disconnects == 2
    assert [len(group.failures) for group in groups] == [0, 1, 1, 0]


async def test_rows_that_never_answer_are_sent_as_often_as_the_budget_says(row):
    async with FakeGymServer({1: Fault.SILENT}) as server:
        gym = GymConfig(registry_url=server.url, row_timeout_s=2.0)
        config = RolloutConfig(gym=gym, max_infra_attempts=3, failure_policy="mask")
        async with RolloutEngine(config) as engine:
            async with contextlib.aclosing(
                engine.stream([row("fake_agent") for _ in range(3)])
            ) as stream:
                with anyio.fail_after(40):
                    groups = [group async for group in stream]
        assert server.requests == {0: 1, 1: 3, 2: 1}
    assert groups[-1].index == 1
    assert groups[-1].failures[0].error == "RolloutTimeout"
    assert groups[-1].metrics["rollout_stragglers/fake_agent"] == 1.0
