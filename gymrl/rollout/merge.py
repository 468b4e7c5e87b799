"""Several streams as one, in completion order.

Each stream is read by a task of its own, held by the merge and ended with it. What was read waits
in a bounded buffer: a consumer that is slow holds the producers back, and rows that arrived before
a failure are handed over before it is raised.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import anyio

from gymrl.concurrency import OwnedTasks, close_within, closing_stream
from gymrl.errors import RolloutStreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


class Tagged(NamedTuple, Generic[T]):
    """One item and the label of the stream it came from."""

    label: str
    item: T


class _Ended(NamedTuple):
    label: str
    error: BaseException | None


class StreamMerge(Generic[T]):
    """The merge itself: an async iterator of :class:`Tagged`.

    Streams may be added while it runs; it ends when all of them have ended. Iterate it from one
    task, and leave by :meth:`aclose` (from any task), which cancels and closes every stream.

    Args:
        buffer: Items that may wait for the consumer, over all streams.
    """

    def __init__(self, buffer: int = 64) -> None:
        self._tasks = OwnedTasks("merge", on_error=lambda _: None)  # reported as events instead
        self._events: collections.deque[Tagged[T] | _Ended] = collections.deque()
        self._room = anyio.Semaphore(buffer)
        self._wake = anyio.Event()
        self._running: dict[str, int] = {}
        self._closed = False

    @property
    def running(self) -> tuple[str, ...]:
        """Labels of the streams that have not ended."""
        return tuple(label for label, count in self._running.items() if count)

    def add(self, label: str, stream: AsyncIterator[T]) -> None:
        """Start to read a stream.

        Args:
            label: The instance it comes from; several streams may share one.
            stream: Closed by the merge, if it can be closed.

        Raises:
            RuntimeError: The merge is closed.
        """
        _ = self._tasks.start(self._read(label, stream), label)
        self._running[label] = self._running.get(label, 0) + 1

    async def _read(self, label: str, stream: AsyncIterator[T]) -> None:
        try:
            async with closing_stream(stream):
                async for item in stream:
                    await self._room.acquire()
                    self._put(Tagged(label, item))
        except Exception as error:  # noqa: BLE001  # raised to the consumer, in order
            self._put(_Ended(label, error))
        except BaseException as error:  # the consumer must not wait for ever
            self._put(_Ended(label, error))
            raise
        else:
            self._put(_Ended(label, None))

    def _put(self, event: Tagged[T] | _Ended) -> None:
        self._events.append(event)
        self._wake.set()

    def __aiter__(self) -> StreamMerge[T]:
        return self

    async def __anext__(self) -> Tagged[T]:
        """The next item of any stream.

        Raises:
            StopAsyncIteration: Every stream has ended.
            RolloutStreamError: A stream failed (``instance 'label' failed``, the cause chained),
                or the merge was closed under its consumer.
        """
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Tagged):
                    self._room.release()
                    return event
                self._running[event.label] -= 1
                if event.error is not None:
                    raise self._failed(event.label, event.error)
            if self._closed:
                raise RolloutStreamError("the stream was closed while it was read")
            if not self.running:
                raise StopAsyncIteration
            self._wake = anyio.Event()
            await self._wake.wait()

    def _failed(self, label: str, error: BaseException) -> RolloutStreamError:
        if self._closed and isinstance(error, asyncio.CancelledError):
            return RolloutStreamError("the stream was closed while it was read")
        failure = RolloutStreamError(
            f"instance {label!r} failed: {type(error).__name__}: {error}", instance=label
        )
        failure.__cause__ = error
        return failure

    async def aclose(self) -> None:
        """Cancel what still runs, close every stream, and wait for that. Safe to call twice."""
        self._closed = True
        await close_within(self._tasks.close(), CLOSE_TIMEOUT_S, "the streams of a rollout")
        self._wake.set()


async def merge_streams(
    streams: Iterable[tuple[str, AsyncIterator[T]]], buffer: int = 64
) -> AsyncIterator[Tagged[T]]:
    """Interleave labelled streams in completion order.

    Leaving early (``aclose``, or an error of the consumer) cancels the streams and closes them.

    Raises:
        RolloutStreamError: As :class:`StreamMerge`; the other streams are closed by then.
    """
    merge: StreamMerge[T] = StreamMerge(buffer)
    try:
        for label, stream in streams:
            merge.add(label, stream)
        async for tagged in merge:
            yield tagged
    finally:
        await merge.aclose()
