import asyncio

import anyio
import anyio.lowlevel
import pytest

from gymrl.concurrency import (
    OwnedTasks,
    close_within,
    closing_stream,
    deadline,
    gather_bounded,
    growing_pause,
    run_to_end,
)
from gymrl.errors import DeadlineExceeded


async def test_a_deadline_names_what_was_waited_for_and_the_setting():
    with pytest.raises(
        DeadlineExceeded, match=r"the answer did not happen within 0.01 s \(set by row_timeout_s\)"
    ):
        with deadline(0.01, "the answer", setting="row_timeout_s"):
            await anyio.sleep_forever()


async def test_no_deadline_waits_for_the_block():
    with deadline(None, "the answer"):
        await anyio.sleep(0.01)


async def test_cancellation_from_outside_passes_through_a_deadline():
    with anyio.move_on_after(0.01) as outer:
        with deadline(60, "the answer"):
            await anyio.sleep_forever()

    assert outer.cancelled_caught


async def test_gathered_results_come_in_the_order_of_the_items():
    async def slower_first(n: int) -> int:
        await anyio.sleep(0.02 / n)
        return n * 10

    assert await gather_bounded(slower_first, [1, 2, 3]) == [10, 20, 30]


async def test_a_single_item_needs_no_task_of_its_own():
    async def task_of(_: int) -> int:
        return anyio.get_current_task().id

    own = anyio.get_current_task().id
    assert await gather_bounded(task_of, [1], limit=3) == [own]
    assert own not in await gather_bounded(task_of, [1, 2])


async def test_no_more_than_the_limit_run_at_a_time():
    running = 0
    most = 0

    async def count(_: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(0.001)
        running -= 1

    await gather_bounded(count, range(10), limit=3)

    assert most == 3


async def test_the_first_error_comes_as_itself_and_the_siblings_are_cancelled():
    cancelled = []

    async def one_fails(n: int) -> None:
        if n == 1:
            raise KeyError("x")
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            cancelled.append(n)
            raise

    with pytest.raises(KeyError, match="x"):
        await gather_bounded(one_fails, [0, 1, 2])

    assert sorted(cancelled) == [0, 2]


async def test_closing_is_given_up_after_its_time_and_says_so(caplog):
    assert not await close_within(anyio.sleep_forever(), 0.01, "the server")
    assert "closing the server took longer than 0.01 s" in caplog.text


async def test_a_close_that_raises_is_logged_and_does_not_hide_the_error_that_led_here(caplog):
    async def fail() -> None:
        raise OSError("gone")

    assert not await close_within(fail(), 1, "the link")
    assert "closing the link failed" in caplog.text


async def test_closing_goes_on_while_the_task_is_being_cancelled():
    closed = []

    async def close() -> None:
        await anyio.sleep(0.01)
        closed.append(True)

    with anyio.move_on_after(0.001):
        try:
            await anyio.sleep_forever()
        finally:
            await close_within(close(), 1, "the link")

    assert closed == [True]


async def test_owned_tasks_end_with_their_owner():
    ended = []

    async def run() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    tasks = OwnedTasks("reader")
    tasks.start(run(), "a")
    await anyio.lowlevel.checkpoint()
    await tasks.close()

    assert ended == [True]
    assert len(tasks) == 0


async def test_the_error_of_an_owned_task_is_told_at_once():
    told: list[BaseException] = []

    async def fail() -> None:
        raise ValueError("torn")

    tasks = OwnedTasks("reader", on_error=told.append)
    tasks.start(fail(), "a")
    await anyio.sleep(0.01)
    await tasks.close()

    assert [str(error) for error in told] == ["torn"]


async def test_an_error_nobody_was_told_of_is_raised_when_the_owner_closes():
    async def fail() -> None:
        raise ValueError("torn")

    tasks = OwnedTasks("reader")
    tasks.start(fail(), "a")
    await anyio.sleep(0.01)

    with pytest.raises(ValueError, match="torn"):
        await tasks.close()


async def test_a_closed_owner_starts_nothing():
    tasks = OwnedTasks("reader")
    await tasks.close()

    with pytest.raises(RuntimeError, match="reader is closed; late was not started"):
        tasks.start(anyio.lowlevel.checkpoint(), "late")


async def test_an_owned_task_may_close_its_owner():
    tasks = OwnedTasks("reader")
    done = anyio.Event()

    async def close() -> None:
        await tasks.close()
        done.set()

    tasks.start(close(), "closer")
    with deadline(5, "the close"):
        await done.wait()


async def test_a_consumer_that_leaves_early_closes_the_stream():
    closed = []

    async def numbers():
        try:
            for n in range(10):
                yield n
        finally:
            closed.append(True)

    async with closing_stream(numbers()) as stream:
        async for _ in stream:
            break

    assert closed == [True]


def test_a_pause_doubles_up_to_its_limit_also_after_a_week_of_trying():
    assert [growing_pause(0.5, times, 30.0) for times in (1, 2, 3, 6, 7)] == [0.5, 1, 2, 16, 30]
    assert growing_pause(0.5, 100_000, 30.0) == 30.0
    assert growing_pause(0.0, 100_000, 30.0) == 0.0


async def test_what_must_not_be_left_half_done_ends_however_often_its_caller_is_cancelled():
    done = []

    async def close():
        for step in range(3):
            await asyncio.sleep(0.01)
            done.append(step)

    async def caller():
        await run_to_end(close(), "a close")

    task = asyncio.get_running_loop().create_task(caller())
    for _ in range(2):
        await asyncio.sleep(0.005)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [0, 1, 2]


async def test_what_runs_to_its_end_gives_its_result_or_its_error():
    async def answer():
        return 42

    async def fail():
        raise KeyError("x")

    assert await run_to_end(answer(), "an answer") == 42
    with pytest.raises(KeyError):
        await run_to_end(fail(), "a failure")
    with anyio.move_on_after(0.01) as scope:
        assert await run_to_end(asyncio.sleep(0.05, "slept"), "a sleep") == "slept"
        await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
