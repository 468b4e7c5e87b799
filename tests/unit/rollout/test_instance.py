"""An instance over actors in this process: killed by their handle, started again by themselves."""

import contextlib
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest

from gymrl.actors import Actor, RestartPolicy, spawn
from gymrl.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorError,
    RolloutStreamError,
    WeightsLostError,
)
from gymrl.rollout.instance import Instance
from gymrl.rollout.restarts import Restarts


class Echo(Actor):
    async def say(self, text: str) -> str:
        return text

    async def count(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number
            await anyio.sleep(0.01)

    async def health_check(self) -> None:
        pass


class Home:
    """Opens workers, notes it, and can be told to fail."""

    def __init__(self):
        self.opened = 0
        self.prepared = 0
        self.failures = []

    async def open(self):
        self.opened += 1
        if self.failures:
            raise self.failures.pop(0)
        return await spawn(Echo, in_process=True)

    async def prepare(self, worker):
        self.prepared += 1
        return f"endpoint {self.prepared}"


@pytest.fixture
async def make():
    """Instances that are open, by name; leaving closes them."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(home, name="x", *, needs=None, **policy):
            policy.setdefault("backoff_s", 0.0)
            policy.setdefault("correlation_s", 0.0)
            restarts = Restarts(RestartPolicy(**policy))
            instance = Instance(
                name, home.open, home.prepare, restarts, start_timeout_s=5, needs=needs
            )
            stack.push_async_callback(instance.close)
            await instance.open()
            await instance.prepare()
            return instance

        yield make


async def ready(instance):
    with anyio.fail_after(10):
        await instance.current()


async def test_it_is_used_like_its_worker(make):
    instance = await make(Home())
    assert await instance.call("say", "hello") == "hello"
    assert [n async for n in instance.stream("count", 3)] == [0, 1, 2]
    assert instance.endpoint == "endpoint 1"
    assert (instance.is_ready, instance.in_flight) == (True, 0)
    assert await instance.ping(1.0)


async def test_a_dead_worker_is_replaced_and_prepared_like_the_first(make):
    home = Home()
    instance = await make(home)
    told = []
    instance.when_dead(lambda: told.append("died"))
    instance.kill()
    await anyio.wait_all_tasks_blocked()
    await ready(instance)
    assert await instance.call("say", "again") == "again"
    assert (home.opened, home.prepared, instance.deaths, told) == (2, 2, 1, ["died"])
    assert instance.endpoint == "endpoint 2"


async def test_what_is_under_way_fails_and_what_comes_after_waits_for_the_new_worker(make):
    instance = await make(Home())
    stream = instance.stream("count", 100)
    assert await anext(stream) == 0
    instance.kill()
    with pytest.raises(ActorDiedError):
        [n async for n in stream]
    with anyio.fail_after(10):
        assert [n async for n in instance.stream("count", 2)] == [0, 1]


async def test_a_restart_that_fails_is_tried_again_within_the_budget(make):
    home = Home()
    instance = await make(home, restarts=3)
    home.failures = [ActorError("no memory"), ActorError("no memory")]
    instance.kill()
    await anyio.wait_all_tasks_blocked()
    await ready(instance)
    assert home.opened == 4


async def test_a_restart_that_fails_by_a_foreign_error_is_not_waited_for_for_ever(make):
    home = Home()
    instance = await make(home, restarts=1)
    home.failures = [OSError("too many open files"), KeyError("odd")]
    instance.kill()
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(RolloutStreamError, match="no restart is left"):
        await ready(instance)


async def test_a_worker_whose_weights_nobody_holds_is_lost_with_its_first_death(make):
    home = Home()
    instance = await make(home, restarts=3)
    home.failures = [WeightsLostError("weights '7' came by transfer")]
    instance.kill()
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(RolloutStreamError, match=r"'7' came by transfer; how it died: .*killed by"):
        await ready(instance)
    assert home.opened == 2


async def test_past_the_budget_everything_asked_of_it_fails_with_how_it_died(make):
    home = Home()
    instance = await make(home, restarts=1)
    home.failures = [ActorError("no memory"), ActorError("no memory")]
    instance.kill()
    with pytest.raises(RolloutStreamError, match="instance 'x' failed: ActorError: no memory"):
        await instance.call("say", "hello")
    with pytest.raises(RolloutStreamError, match="worker_restarts=1"):
        await anext(instance.stream("count", 1))
    with pytest.raises(RolloutStreamError, match="instance 'x' failed"):
        instance.check_running()
    assert instance.is_lost
    assert instance.closed


async def test_no_restarts_make_the_first_death_the_last(make):
    home = Home()
    instance = await make(home, restarts=0)
    instance.kill()
    with pytest.raises(RolloutStreamError, match="was killed") as caught:
        await instance.call("say", "hello")
    assert isinstance(caught.value.__cause__, ActorDiedError)
    assert home.opened == 1


async def test_a_health_check_meanwhile_hears_that_it_is_down(make):
    instance = await make(Home())
    instance.check_running()
    instance.kill()
    with pytest.raises(ActorDiedError, match="x is down and being started again"):
        instance.check_running()
    await anyio.wait_all_tasks_blocked()
    await ready(instance)
    instance.check_running()


async def test_success_gives_restarts_back(make):
    instance = await make(Home(), restarts=1)
    for _ in range(4):
        instance.kill()
        await anyio.wait_all_tasks_blocked()
        await ready(instance)
        instance.succeeded()
    assert not instance.is_lost


async def test_an_instance_waits_for_the_one_that_it_needs(make):
    first = Home()
    generator = await make(first, "generator")
    worker = await make(Home(), "worker", needs=generator)
    first.failures = [ActorError("not yet")]
    generator.kill()
    with anyio.fail_after(10):
        assert await worker.call("say", "hello") == "hello"
    assert (generator.deaths, worker.deaths, first.opened) == (1, 0, 3)


async def test_the_loss_of_what_it_needs_is_its_own_and_told_at_once(make):
    generator = await make(Home(), "generator", restarts=0)
    worker = await make(Home(), "worker", needs=generator)
    told = []
    worker.when_lost(told.append)
    generator.kill()
    with pytest.raises(RolloutStreamError, match="instance 'generator' failed"):
        await worker.call("say", "hello")
    assert worker.is_lost
    assert [str(error)[:28] for error in told] == ["instance 'generator' failed:"]
    worker.forget(told.append)
    worker.forget(told.append)


async def test_suspects_run_one_lot_at_a_time_and_company_waits_for_them(make):
    instance = await make(Home())
    events = []

    async def company(name):
        async with instance.company():
            events.append(f"{name} begins")
            await anyio.sleep(0.01)
            events.append(f"{name} ends")

    async def suspects(name):
        async with instance.testing() as are_alone:
            events.append(f"{name} begins {are_alone}")
            await anyio.sleep(0.01)
            events.append(f"{name} ends")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(suspects, "one")
        tasks.start_soon(suspects, "two")
        await anyio.lowlevel.checkpoint()
        assert instance.is_testing
        tasks.start_soon(company, "others")
    assert events == [
        "one begins True",
        "one ends",
        "two begins True",
        "two ends",
        "others begins",
        "others ends",
    ]
    assert not instance.is_testing


async def test_suspects_know_when_others_were_there_before_them(make):
    instance = await make(Home())
    async with instance.company(), instance.testing() as are_alone:
        assert not are_alone
    async with instance.testing() as are_alone:
        assert are_alone


async def test_a_closed_instance_says_so_and_starts_nothing_again(make):
    home = Home()
    instance = await make(home)
    await instance.close()
    await instance.close()
    with pytest.raises(ActorClosedError, match="x is closed"):
        await instance.call("say", "hello")
    assert home.opened == 1


async def test_closing_ends_a_restart_that_is_under_way(make):
    home = Home()
    instance = await make(home, restarts=50, backoff_s=60.0, max_backoff_s=60.0)
    home.failures = [ActorError("no memory")]
    instance.kill()
    await anyio.wait_all_tasks_blocked()
    with anyio.fail_after(10):
        await instance.close()
