"""Supervised workers: restarts, redispatch, poison, correlated deaths, health, close."""

# ruff: noqa: PERF401, PT012, RUF043
# Workers are other processes: their state is polled, and streams raise while they are read.

from __future__ import annotations

import contextlib
import os
import resource
import signal

import anyio
import psutil
import pytest

from gymrl.actors import RestartPolicy, SpawnOptions, Supervisor
from gymrl.concurrency import gather_bounded
from gymrl.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorStartError,
    ConfigError,
    EncodeError,
    PoisonError,
)
from tests.integration.actors.sample_actors import BadSetup, Counter, Mortal, Sleeper
from tests.integration.actors.watching import until, what_is_left, what_is_open


async def outcome(call):
    try:
        return await call
    except Exception as error:  # noqa: BLE001
        return error


async def test_calls_are_spread_over_all_workers():
    async with Supervisor(Mortal, replicas=2) as mortals:
        pids = await gather_bounded(lambda _: mortals.call("pids"), range(20))
        assert {pid[0] for pid in pids} == {worker.pid for worker in mortals.workers}


async def test_set_up_runs_again_after_a_restart():
    async with Supervisor(Counter, replicas=1, start=5) as counters:
        assert await counters.call("add", 1) == 6
        first = counters.workers[0].pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: counters.workers and counters.workers[0].pid != first)
        assert await counters.call("add", 1) == 6


async def test_a_poisonous_payload_fails_alone():
    async with Supervisor(Mortal, replicas=2) as mortals:
        results = await gather_bounded(
            lambda n: outcome(mortals.call("exit_on", n)), [*range(10), 13, *range(20, 30)]
        )
        assert [r for r in results if not isinstance(r, Exception)] == [*range(10), *range(20, 30)]
        poison = results[10]
        assert isinstance(poison, PoisonError)
        assert poison.deaths == 2
        assert "exit code 13" in str(poison)
        health = await mortals.health()
        deaths = sum(worker.deaths for worker in health)
        with pytest.raises(PoisonError):
            await mortals.call("exit_on", 13)
        assert sum(worker.deaths for worker in await mortals.health()) == deaths
        assert await mortals.call("exit_on", 5) == 5


async def test_without_redispatch_calls_of_a_dead_worker_fail_as_they_are():
    policy = RestartPolicy(redispatch=False)
    async with Supervisor(Mortal, policy=policy) as mortals:
        results = await gather_bounded(lambda n: outcome(mortals.call("exit_on", n)), [13, 1, 2])
        assert [type(r) for r in results] == [ActorDiedError] * 3
        assert await mortals.call("exit_on", 1) == 1


async def test_a_stream_of_a_dead_worker_fails_and_is_not_begun_again():
    async with Supervisor(Mortal) as mortals:
        items = []
        with pytest.raises(ActorDiedError):
            async for item in mortals.stream("three_then_die"):
                items.append(item)
        assert items == [0, 1, 2]
        assert await mortals.call("exit_on", 1) == 1


async def test_when_the_budget_is_spent_calls_fail_and_say_so():
    policy = RestartPolicy(restarts=1, poison_after=10, backoff_s=0)
    async with Supervisor(Mortal, policy=policy) as mortals:
        with anyio.fail_after(30), pytest.raises(ActorDiedError, match="RestartPolicy.restarts"):
            await mortals.call("exit_on", 13)
        with pytest.raises(ActorDiedError, match="all 1 workers"):
            await mortals.call("exit_on", 1)
        assert [worker.state for worker in await mortals.health()] == ["lost"]


async def test_success_refills_the_budget():
    policy = RestartPolicy(restarts=1, redispatch=False)
    async with Supervisor(Mortal, policy=policy) as mortals:
        for code in range(3, 6):
            with pytest.raises(ActorDiedError):
                await mortals.call("exit", code)
            assert await mortals.call("exit_on", 1) == 1


async def test_all_workers_dying_together_cost_one_restart():
    policy = RestartPolicy(restarts=1, correlation_s=60)
    async with Supervisor(Counter, replicas=3, policy=policy) as counters:
        pids = {worker.pid for worker in counters.workers}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await until(
            lambda: len(counters.workers) == 3 and not pids & {w.pid for w in counters.workers}
        )
        assert await gather_bounded(lambda n: counters.call("add", 0), range(6)) == [0] * 6


async def test_calls_wait_for_a_restart():
    async with Supervisor(Counter, start=1) as counters:
        os.kill(counters.workers[0].pid, signal.SIGKILL)
        with anyio.fail_after(40):
            assert await counters.call("add", 1) == 2


async def test_health_tells_who_is_there():
    async with Supervisor(Sleeper, replicas=2) as sleepers:
        async with anyio.create_task_group() as group:
            group.start_soon(sleepers.call, "sleep", 60)
            await until(lambda: sum(worker.in_flight for worker in sleepers.workers) == 1)
            health = await sleepers.health(timeout_s=30)
            group.cancel_scope.cancel()
        assert [worker.state for worker in health] == ["ready", "ready"]
        assert [worker.in_flight for worker in health] == [1, 0]
        assert all(worker.responsive for worker in health)


async def test_a_worker_whose_loop_hangs_is_killed_and_restarted_when_asked():
    policy = RestartPolicy(redispatch=False)
    options = SpawnOptions(heartbeat_timeout_s=2.0)
    async with Supervisor(Mortal, policy=policy, options=options) as mortals:
        with anyio.fail_after(40):
            with pytest.raises(ActorDiedError, match="heartbeat_timeout_s=2 s"):
                await mortals.call("block", 60)
            assert await mortals.call("exit_on", 1) == 1


async def test_a_failed_start_of_one_closes_the_others():
    before = what_is_open()
    with pytest.raises(ActorStartError):
        async with Supervisor(BadSetup, replicas=2, how="raise"):
            pass
    assert await what_is_left(before) == {}


async def test_wrong_arguments_are_refused_before_anything_starts():
    with pytest.raises(EncodeError):
        Supervisor(Counter, start="x")
    with pytest.raises(ConfigError, match="replicas"):
        Supervisor(Counter, replicas=0)
    async with Supervisor(Counter) as counters:
        with pytest.raises(EncodeError):
            await counters.call("add", "x")
        with pytest.raises(AttributeError):
            await counters.call("nothing")


async def test_a_closed_supervisor_refuses_calls_and_closes_twice():
    async with Supervisor(Counter, options=SpawnOptions(name="named")) as counters:
        assert counters.workers[0].name == "named-0"
    with pytest.raises(ActorClosedError):
        await counters.call("add", 1)
    await counters.close()


async def test_supervised_twins_run_in_this_process():
    async with Supervisor(Counter, replicas=2, in_process=True, start=1) as counters:
        assert await counters.call("add", 1) == 2
        assert [i async for i in counters.stream("count", 3)] == [0, 1, 2]
        counters.workers[0].kill()
        assert await counters.call("add", 1) in (2, 3)
        await until(lambda: len(counters.workers) == 2)


async def test_a_restart_without_descriptors_is_tried_again_and_no_call_waits_for_ever():
    # A failed start that was no ActorError left its worker in "starting", and its callers waiting.
    policy = RestartPolicy(restarts=200, backoff_s=0.05, max_backoff_s=0.1)
    async with Supervisor(Counter, policy=policy, start=1) as counters:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 20, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            os.kill(counters.workers[0].pid, signal.SIGKILL)
            async with anyio.create_task_group() as group:
                group.start_soon(counters.call, "add", 1)
                await until(lambda: counters.workers == [])
                await anyio.sleep(0.3)
                assert counters.workers == []
                for descriptor in taken:
                    os.close(descriptor)
                taken.clear()
            assert await counters.call("add", 1) == 3
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_restart_without_end_of_bad_starts_tells_its_callers():
    policy = RestartPolicy(restarts=2, backoff_s=0.01)
    async with Supervisor(Counter, policy=policy) as counters:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 2, hard))
        try:
            os.kill(counters.workers[0].pid, signal.SIGKILL)
            with anyio.fail_after(40), pytest.raises(ActorDiedError, match="Too many open files"):
                await counters.call("add", 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
