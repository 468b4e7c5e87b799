"""Worker processes that live and do nothing: stopped, or stuck in a call that blocks."""

import json
import os
import signal

import anyio
import pytest

from gymrl.config import GenerationConfig, GymConfig, RolloutConfig
from gymrl.errors import RolloutStreamError
from gymrl.rollout.engine import RolloutEngine
from gymrl.testing.gym_server import FakeGymServer, Fault, gym_answer
from gymrl.types import Trajectory

BEATS = {"heartbeat_timeout_s": 2.0}


async def test_the_rows_of_a_stopped_worker_are_done_elsewhere(make_engine, row, caplog):
    async with make_engine(num_workers=2, seed=3, **BEATS) as engine:
        stopped = engine.fleet.instances[1]
        os.kill(stopped.pid, signal.SIGSTOP)
        with anyio.fail_after(40):
            groups = [group async for group in engine.stream([row() for _ in range(8)])]
        assert stopped.deaths == 1
    assert sorted(group.index for group in groups) == list(range(8))
    assert all(isinstance(sample, Trajectory) for g in groups for sample in g.samples)
    assert engine.progress.redispatches == 4, "the rows of the stopped worker, each once"
    (text,) = [r.getMessage() for r in caplog.records if "died: " in r.getMessage()]
    assert "instance 'default/1'" in text
    assert "showed nothing for heartbeat_timeout_s=2 s" in text


async def test_a_row_that_blocks_its_workers_loop_is_poison(make_engine, row):
    rows = [row(delay=0.3), row(delay=0.1, block_times=99), row(delay=0.2)]
    settings = {"failure_policy": "mask", "heartbeat_timeout_s": 1.0}
    async with make_engine(**settings) as engine:
        with anyio.fail_after(50):
            groups = await engine.run(rows)
        await engine.health_check()
    assert [len(group.trajectories) for group in groups] == [1, 0, 1]
    (failure,) = groups[1].failures
    assert failure.error == "PoisonError"
    assert "heartbeat_timeout_s=1 s" in failure.message


async def test_without_restarts_a_stopped_worker_ends_the_run_with_its_name_and_the_setting(
    make_engine, row
):
    async with make_engine(worker_restarts=0, **BEATS) as engine:
        stream = engine.stream([row(), row(delay=60)])
        await anext(stream)
        os.kill(engine.fleet.instances[0].pid, signal.SIGSTOP)
        with pytest.raises(RolloutStreamError, match="heartbeat_timeout_s=2 s") as caught:
            with anyio.fail_after(20):
                await anext(stream)
    assert caught.value.instance == "default"
    assert "instance 'default' failed" in str(caught.value)


async def test_a_stopped_generator_is_started_again(make_engine, row):
    async with make_engine(generation=GenerationConfig(model="tiny"), **BEATS) as engine:
        generator = engine.fleet.instances[-1]
        died = anyio.Event()
        generator.when_dead(died.set)
        os.kill(generator.pid, signal.SIGSTOP)
        with anyio.fail_after(30):
            await died.wait()
            assert len(await engine.run([row(), row()])) == 2
        await engine.health_check()


async def test_a_gym_worker_that_is_stopped_loses_no_row():
    answers = [Fault.SILENT, gym_answer([([1, 2], [3])])]
    async with FakeGymServer(dict.fromkeys(range(6), answers)) as server:
        gym = GymConfig(registry_url=server.url)
        agent = {"agent_ref": {"name": "fake_agent"}}
        rows = [{"responses_create_params": {"input": "2+2?"}, **agent} for _ in range(6)]
        async with RolloutEngine(RolloutConfig(gym=gym, **BEATS)) as engine:
            with anyio.fail_after(50):
                async with anyio.create_task_group() as tasks:
                    stream = engine.stream(rows)
                    tasks.start_soon(stop_when_asked, server, engine)
                    groups = [group async for group in stream]
            assert engine.fleet.instances[0].deaths == 1
    assert sorted(group.index for group in groups) == list(range(6))
    assert set(server.requests.values()) == {2}


async def stop_when_asked(server, engine):
    await server.wait_for_requests(6)
    os.kill(engine.fleet.instances[0].pid, signal.SIGSTOP)


async def test_a_worker_that_is_merely_slow_to_its_rows_is_left_alone(make_engine, row):
    async with make_engine(heartbeat_timeout_s=1.0) as engine:
        groups = await engine.run([row(delay=2.5)])
        assert json.loads(groups[0].samples[0].result)["pid"] == engine.fleet.instances[0].pid
        assert engine.fleet.instances[0].deaths == 0
