import threading

import anyio
import pytest

from gymrl.concurrency import OwnedTasks, gather_bounded
from gymrl.environments import OpenEnvironment, open_environment, spawn_environment
from gymrl.environments.workers import load_factory
from gymrl.errors import ConfigError, EnvironmentContractError, RolloutDataFailure
from tests.unit.environments.worlds import Echo, Opened, Overlaps, reply

WORLDS = "tests.unit.environments.worlds"


def logs(*contents):
    return [[{"role": "user", "content": content}] for content in contents]


async def test_a_blocking_environment_runs_outside_of_the_loops_thread():
    opened = open_environment(Echo(), name="echo")

    answer = await opened.step(logs("a", "b"), [None, None])

    assert [o["content"] for o in answer.observations] == ["a", "b"]
    assert threading.main_thread().name not in answer.answers[0]


async def test_an_async_environment_runs_in_the_loop():
    class InLoop:
        async def step(self, message_logs, metadata):
            await anyio.lowlevel.checkpoint()
            return reply(message_logs, metadata, answers=[threading.current_thread().name])

    answer = await open_environment(InLoop(), name="loop").step(logs("a"), [None])

    assert answer.answers == [threading.main_thread().name]


async def test_a_plain_function_that_returns_an_awaitable_is_awaited():
    class Wrapped:
        def step(self, message_logs, metadata):
            return self._step(message_logs, metadata)

        async def _step(self, message_logs, metadata):
            return reply(message_logs, metadata)

    answer = await open_environment(Wrapped(), name="wrapped").step(logs("a"), [None])
    assert answer.terminateds == [True]


@pytest.mark.parametrize("max_threads", [1, 3])
async def test_steps_of_a_blocking_environment_overlap_only_as_allowed(max_threads):
    world = Overlaps()
    opened = open_environment(world, name="world", max_threads=max_threads)

    await gather_bounded(lambda content: opened.step(logs(content), [None]), "abcdef")

    assert 1 <= world.most <= max_threads


async def test_what_a_blocking_environment_raises_arrives_as_itself():
    class Broken:
        def step(self, message_logs, metadata):
            raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        await open_environment(Broken(), name="broken").step(logs("a"), [None])


class Leaves:
    """Asks for the end of the process, as programs made for the command line do."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def step(self, message_logs, metadata):
        raise self.error


class LeavesInTheLoop(Leaves):
    async def step(self, message_logs, metadata):
        raise self.error


@pytest.mark.parametrize(
    "environment",
    [Leaves(SystemExit(3)), Leaves(KeyboardInterrupt()), LeavesInTheLoop(SystemExit(3))],
)
async def test_an_environment_that_exits_ends_its_step_and_not_the_process(environment):
    """The event loop lets SystemExit through to whoever runs it, past every task."""
    opened = open_environment(environment, name="exiting")
    with pytest.raises(RolloutDataFailure, match="environment 'exiting' raised") as caught:
        await opened.step([[]], [None])
    assert caught.value.__cause__ is environment.error


async def test_a_cancelled_step_that_does_not_end_is_said_to_be_stuck(caplog):
    entered, release = threading.Event(), threading.Event()

    class Blocking:
        def step(self, message_logs, metadata):
            entered.set()
            release.wait(10)
            return reply(message_logs, metadata)

    opened = OpenEnvironment(Blocking(), name="blocking", stuck_after_s=0.01)
    async with anyio.create_task_group() as group:
        group.start_soon(opened.step, logs("a"), [None])
        await anyio.to_thread.run_sync(entered.wait)
        group.cancel_scope.cancel()
        with anyio.fail_after(9, shield=True):
            while "environment 'blocking': a cancelled step still runs" not in caplog.text:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        release.set()


async def test_a_plain_cancel_of_asyncio_waits_for_the_thread_as_well():
    entered, release = threading.Event(), threading.Event()
    left = []

    class Blocking:
        def step(self, message_logs, metadata):
            entered.set()
            release.wait(10)
            left.append(True)
            return reply(message_logs, metadata)

    tasks = OwnedTasks("test")
    tasks.start(open_environment(Blocking(), name="b").step(logs("a"), [None]), "step")
    await anyio.to_thread.run_sync(entered.wait)
    async with anyio.create_task_group() as group:
        group.start_soon(tasks.close)
        await anyio.sleep(0.02)
        assert len(tasks) == 1
        release.set()

    assert left == [True]


async def test_metrics_are_optional_and_checked():
    class Wrong(Echo):
        def global_post_process_and_metrics(self, batch):
            return {"accuracy": 1.0}

    opened = open_environment(Echo(), name="echo")
    assert await opened.global_post_process_and_metrics({"rewards": [1]}) == (
        {"rewards": [1]},
        {"rows": 1.0},
    )
    plain = open_environment(Overlaps(), name="plain")
    assert await plain.global_post_process_and_metrics({}) == ({}, {})
    with pytest.raises(EnvironmentContractError, match="'wrong'"):
        await open_environment(Wrong(), name="wrong").global_post_process_and_metrics({})


async def test_an_environment_in_an_actor_of_this_process_answers_the_same():
    async with spawn_environment(
        f"{WORLDS}:Echo", {"prefix": "> "}, num_workers=2, in_process=True
    ) as world:
        opened = open_environment(world, name="echo")
        answer = await opened.step(logs("a", "b", "c"), [{"n": 1}, None, [2]])
        _, metrics = await opened.global_post_process_and_metrics({"rewards": [1.0, 2.0]})

    assert [o["content"] for o in answer.observations] == ["> a", "> b", "> c"]
    assert answer.metadata == [{"n": 1}, None, [2]]
    assert metrics == {"rows": 2.0}


async def test_an_environment_that_can_be_closed_is_closed_with_its_worker():
    Opened.closed = 0
    async with spawn_environment(f"{WORLDS}:Opened", in_process=True) as world:
        await world.step(logs("a"), [None])
        assert Opened.closed == 0
    assert Opened.closed == 1


@pytest.mark.parametrize(
    "factory", ["no_colon", f"{WORLDS}:Missing", "no.such.module:X", f"{WORLDS}:os.name"]
)
def test_a_factory_that_cannot_be_imported_is_named(factory):
    with pytest.raises(ConfigError, match=factory.partition(":")[2] or factory):
        load_factory(factory)


async def test_workers_are_a_positive_number():
    with pytest.raises(ConfigError, match="num_workers=0"):
        async with spawn_environment(f"{WORLDS}:Echo", num_workers=0):
            pass
