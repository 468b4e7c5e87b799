"""Structured concurrency on anyio, and the one place that may hold a task outside a task group.

What anyio has is used as it is (task groups, cancel scopes, capacity limiters). This module adds
what gymrl needs on top: deadlines whose errors name what was waited for, bounded ordered gathering,
closing that is shielded and bounded, :class:`OwnedTasks` for objects whose tasks must outlive the
call that started them, and the way into an event loop of another thread: processes, engines and
connections belong to one loop, and callers may come from one loop after another, or from none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from gymrl.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
    )

    from anyio.from_thread import BlockingPortal

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def deadline(seconds: float | None, what: str, setting: str | None = None) -> Iterator[None]:
    """Cancel the block after `seconds` and raise an error that says what was waited for.

    Args:
        seconds: None or infinity waits for ever.
        what: What is waited for, as the error will say it.
        setting: The setting that holds the deadline, as the error will name it.

    Raises:
        DeadlineExceeded: The block did not end in time. Cancellation from outside passes through
            as it is.
    """
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        hint = f" (set by {setting})" if setting else ""
        raise DeadlineExceeded(
            f"{what} did not happen within {seconds:g} s{hint}",
            what=what,
            seconds=seconds,
            setting=setting,
        )


async def gather_bounded(
    function: Callable[[T], Awaitable[R]], items: Iterable[T], limit: int | None = None
) -> list[R]:
    """`function` over `items` concurrently; results in the order of `items`.

    Args:
        function: Called once an item.
        items: Consumed at once.
        limit: At most this many at a time; None: all.

    Raises:
        BaseException: The first error, as itself (not wrapped in a group); the other calls are
            cancelled and have ended by then.
    """
    values = list(items)
    if len(values) == 1:
        # In the caller's own task: a group for it would take longer than many a call.
        return [await function(values[0])]
    results: list[R | None] = [None] * len(values)
    limiter = anyio.CapacityLimiter(limit) if limit else contextlib.nullcontext()
    first_error: list[Exception] = []

    async def one(index: int, item: T) -> None:
        async with limiter:
            try:
                results[index] = await function(item)
            except Exception as error:
                first_error.append(error)
                raise

    try:
        async with anyio.create_task_group() as group:
            for index, item in enumerate(values):
                group.start_soon(one, index, item)
    except BaseExceptionGroup:
        if first_error:
            raise first_error[0] from first_error[0].__cause__
        raise
    return results  # type: ignore[return-value]  # every slot was filled


def growing_pause(first_s: float, times: int, longest_s: float) -> float:
    """Seconds to wait before trying again: `first_s`, doubled each time, `longest_s` at most.

    Args:
        first_s: Before the first repetition.
        times: Which repetition it is, from 1. Any number: a service may be away for a week.
        longest_s: The limit.
    """
    if first_s <= 0:
        return 0.0
    # Beyond it a float has no room for the power.
    doublings = min(times - 1, 1000)
    return min(longest_s, first_s * 2.0**doublings)


async def close_within(close: Awaitable[object], seconds: float, what: str) -> bool:
    """Await `close` even while being cancelled, but no longer than `seconds`.

    Returns:
        Whether it ended in time. A close that did not, or that raised, is logged with `what`;
        it does not hide the error that led here.
    """
    with anyio.move_on_after(seconds, shield=True) as scope:
        try:
            await close
        except Exception:
            logger.exception("closing %s failed", what)
            return False
    if scope.cancelled_caught:
        logger.warning("closing %s took longer than %g s and was given up", what, seconds)
        return False
    return True


class OwnedTasks:
    """Tasks that belong to an object and end with it.

    For objects whose background work (reading a link, watching a child) must live from an
    ``open`` to a ``close`` that other tasks may call. Every task is held; one that fails is
    reported to `on_error` at once and never lost.

    Args:
        name: Prefix of the tasks' names.
        on_error: Called in the event loop with the first error of each failed task. Without it
            the error is logged and raised again by :meth:`close`.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()
        self._errors: list[BaseException] = []
        self._closed = False

    def start(self, coroutine: Coroutine[Any, Any, T], label: str) -> asyncio.Task[T]:
        """Start a task that this object holds.

        Raises:
            RuntimeError: The owner is closed; the coroutine is closed unrun.
        """
        if self._closed:
            coroutine.close()
            raise RuntimeError(f"{self._name} is closed; {label} was not started")
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._name}:{label}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if self._on_error is not None:
            self._on_error(error)
        else:
            logger.error("task %s failed", task.get_name(), exc_info=error)
            self._errors.append(error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel what still runs and wait for its end. Safe to call twice.

        Raises:
            BaseException: The first error nobody was told of.
        """
        self._closed = True
        current = asyncio.current_task()
        pending = [task for task in self._tasks if task is not current]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]


async def wait_for_end(task: asyncio.Task[T]) -> T:
    """Wait for a task to its end, whoever cancels the caller meanwhile, and however often.

    A shielded scope of anyio keeps out the cancellation of anyio's scopes alone, not that of
    ``Task.cancel``, by which ``asyncio.timeout``, ``asyncio.wait_for`` and Ctrl-C work.

    Args:
        task: It must be bounded by itself.

    Raises:
        asyncio.CancelledError: The caller was cancelled; raised when the task has ended.
        BaseException: What the task raised.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (lost := task.exception()) is not None:
            logger.error("%s failed while its caller was cancelled", task.get_name(), exc_info=lost)
        raise cancelled
    return task.result()


async def run_to_end(coroutine: Coroutine[Any, Any, T], name: str) -> T:
    """Run something that must not be left half done, such as a close, in a task of its own.

    Args:
        coroutine: It must be bounded by itself, and leave no cancel scope that it did not enter.
        name: Of the task.

    Raises:
        asyncio.CancelledError: As :func:`wait_for_end`.
        BaseException: What the coroutine raised.
    """
    owner = OwnedTasks(name, on_error=lambda _: None)  # raised to the caller instead
    return await wait_for_end(owner.start(coroutine, "to its end"))


@contextlib.asynccontextmanager
async def closing_stream(stream: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an async generator on the way out, also when the consumer leaves early."""
    try:
        yield stream
    finally:
        aclose = getattr(stream, "aclose", None)
        if aclose is not None:
            with anyio.CancelScope(shield=True):
                await aclose()


def refuse_running_loop(instead: str) -> None:
    """Refuse a blocking call where it would stop an event loop.

    Args:
        instead: What to use there.

    Raises:
        RuntimeError: An event loop runs in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"an event loop runs in this thread, and a blocking call would stop it; use {instead} there"
    )


async def call_across(
    portal: BlockingPortal, function: Callable[..., Coroutine[Any, Any, T]], *args: Any
) -> T:
    """Await ``function(*args)`` in the portal's loop, from another loop.

    When this is cancelled, the call there is cancelled, and has ended by the time this ends.
    """
    scope: list[anyio.CancelScope] = []
    cancelled = False

    async def run() -> T:
        with anyio.CancelScope() as own:
            scope.append(own)
            if cancelled:
                own.cancel()
            return await function(*args)
        raise asyncio.CancelledError

    async def cancel() -> None:
        for own in scope:
            own.cancel()

    running = asyncio.wrap_future(portal.start_task_soon(run))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancelled = True
        with anyio.CancelScope(shield=True):
            await asyncio.wrap_future(portal.start_task_soon(cancel))
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at, so that it is not reported as lost
        raise


async def stream_across(
    portal: BlockingPortal, open_stream: Callable[[], AsyncGenerator[T, None]]
) -> AsyncGenerator[T, None]:
    """The items of a stream that lives in the portal's loop.

    Leaving early closes the stream there and waits for that.
    """

    async def opened() -> AsyncGenerator[T, None]:
        return open_stream()

    stream = await call_across(portal, opened)
    ended: Any = object()

    async def following() -> T:
        item: T = await anext(stream, ended)
        return item

    try:
        while (item := await call_across(portal, following)) is not ended:
            yield item
    finally:
        with anyio.CancelScope(shield=True):
            await call_across(portal, stream.aclose)
