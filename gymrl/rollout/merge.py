"""Several streams as one, in completion order.

Each stream is read by a task of its own, held by the merge and ended with it. What was read waits
in a bounded buffer: a consumer that is slow holds the producers back, and rows that arrived before
a failure are handed over before it is raised.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import anyio

from gymrl.concurrency import OwnedTasks, close_within, closing_stream
from gymrl.errors import RolloutStreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

T = TypeVar("T")
LabelT = TypeVar("LabelT", bound=Hashable)

CLOSE_TIMEOUT_S = 10.0


class Tagged(NamedTuple, Generic[LabelT, T]):
    """One item and the label of the stream it came from."""

    label: LabelT
    item: T


class Ended(NamedTuple, Generic[LabelT]):
    """A stream has ended; with what, where that was an error."""

    label: LabelT
    error: BaseException | None


class StreamMerge(Generic[LabelT, T]):
    """The merge itself: an async iterator of :class:`Tagged`.

    Streams may be added while it runs; it ends when all of them have ended. Iterate it from one
    task, and leave by :meth:`aclose` (from any task), which cancels and closes every stream.

    Args:
        buffer: Items that may wait for the consumer, over all streams.
    """

    def __init__(self, buffer: int = 64) -> None:
        self._tasks = OwnedTasks("merge", on_error=lambda _: None)  # reported as events instead
        self._events: collections.deque[Tagged[LabelT, T] | Ended[LabelT] | Exception] = (
            collections.deque()
        )
        self._room = anyio.Semaphore(buffer)
        self._wake = anyio.Event()
        self._running: dict[LabelT, int] = {}
        self._closed = False

    @property
    def running(self) -> tuple[LabelT, ...]:
        """Labels of the streams that have not ended."""
        return tuple(self._running)

    def add(self, label: LabelT, stream: AsyncIterator[T]) -> None:
        """Start to read a stream.

        Args:
            label: The instance it comes from; several streams may share one.
            stream: Closed by the merge, if it can be closed.

        Raises:
            RuntimeError: The merge is closed.
        """
        _ = self._tasks.start(self._read(label, stream), str(label))
        self._running[label] = self._running.get(label, 0) + 1

    def fail(self, error: Exception) -> None:
        """Have the consumer get `error`, after what arrived before it."""
        self._put(error)

    async def _read(self, label: LabelT, stream: AsyncIterator[T]) -> None:
        try:
            async with closing_stream(stream):
                async for item in stream:
                    await self._room.acquire()
                    self._put(Tagged(label, item))
        except Exception as error:  # noqa: BLE001  # raised to the consumer, in order
            self._put(Ended(label, error))
        except BaseException as error:  # the consumer must not wait for ever
            self._put(Ended(label, error))
            raise
        else:
            self._put(Ended(label, None))

    def _put(self, event: Tagged[LabelT, T] | Ended[LabelT] | Exception) -> None:
        self._events.append(event)
        self._wake.set()

    def __aiter__(self) -> StreamMerge[LabelT, T]:
        return self

    async def __anext__(self) -> Tagged[LabelT, T]:
        """The next item of any stream.

        Raises:
            StopAsyncIteration: Every stream has ended.
            RolloutStreamError: A stream failed (``instance 'label' failed``, the cause chained),
                or the merge was closed under its consumer.
            Exception: What :meth:`fail` has for the consumer.
        """
        while True:
            event = await self.next_event()
            if event is None:
                raise StopAsyncIteration
            if isinstance(event, Tagged):
                return event
            if event.error is not None:
                raise stream_failure(event.label, event.error)

    async def next_event(self) -> Tagged[LabelT, T] | Ended[LabelT] | None:
        """The next item, or the end of a stream; None when every stream has ended.

        For a consumer that goes on when a stream fails. Cancelling it loses nothing.

        Raises:
            RolloutStreamError: The merge was closed under its consumer.
            Exception: What :meth:`fail` has for the consumer.
        """
        while not self._events:
            if self._closed:
                raise _closed_under_consumer()
            if not self._running:
                return None
            self._wake = anyio.Event()
            await self._wake.wait()
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Tagged):
            self._room.release()
            return event
        self._running[event.label] -= 1
        if not self._running[event.label]:
            del self._running[event.label]
        if self._closed and isinstance(event.error, asyncio.CancelledError):
            raise _closed_under_consumer()
        return event

    async def aclose(self) -> None:
        """Cancel what still runs, close every stream, and wait for that. Safe to call twice."""
        self._closed = True
        await close_within(self._tasks.close(), CLOSE_TIMEOUT_S, "the streams of a rollout")
        self._wake.set()


def stream_failure(label: object, error: BaseException) -> RolloutStreamError:
    """The error of a stream that failed, its cause chained."""
    failure = RolloutStreamError(
        f"instance {label!r} failed: {type(error).__name__}: {error}", instance=str(label)
    )
    failure.__cause__ = error
    return failure


def _closed_under_consumer() -> RolloutStreamError:
    return RolloutStreamError("the stream was closed while it was read")


async def merge_streams(
    streams: Iterable[tuple[LabelT, AsyncIterator[T]]], buffer: int = 64
) -> AsyncIterator[Tagged[LabelT, T]]:
    """Interleave labelled streams in completion order.

    Leaving early (``aclose``, or an error of the consumer) cancels the streams and closes them.

    Raises:
        RolloutStreamError: As :class:`StreamMerge`; the other streams are closed by then.
    """
    merge: StreamMerge[LabelT, T] = StreamMerge(buffer)
    try:
        for label, stream in streams:
            merge.add(label, stream)
        async for tagged in merge:
            yield tagged
    finally:
        await merge.aclose()
