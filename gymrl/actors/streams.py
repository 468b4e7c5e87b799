"""Both ends of a stream: the producer's window and the consumer's iterator.

A producer may be ahead by a window of items and bytes; the consumer gives credit back as it reads.
A stream ends by an explicit end or error; leaving it early cancels the producer.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol, Self

import anyio

from gymrl.errors import ActorStreamError

if TYPE_CHECKING:
    from types import TracebackType


class Window:
    """The producer's end: how far it may run ahead.

    Args:
        items: Items that may be under way unread.
        size: Bytes that may be under way unread; one item always may.
    """

    def __init__(self, items: int, size: int) -> None:
        self._items = items
        self._size = size
        self._sent: collections.deque[int] = collections.deque()
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether one more item may be sent now."""
        return not self._sent or (len(self._sent) < self._items and self._bytes < self._size)

    def take(self, size: int) -> None:
        """An item of `size` bytes was sent."""
        self._sent.append(size)
        self._bytes += size

    def credit(self, items: int) -> None:
        """The consumer has read `items` more."""
        for _ in range(min(items, len(self._sent))):
            self._bytes -= self._sent.popleft()
        if self._waiter is not None and not self._waiter.done() and self.is_open:
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until one more item may be sent."""
        while not self.is_open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class StreamSource(Protocol):
    """What a stream's consumer asks of the other side."""

    def open_stream(self, state: StreamState) -> None:
        """Start the producer."""
        ...

    def grant(self, state: StreamState, items: int) -> None:
        """Give credit for items that were read."""
        ...

    def cancel_stream(self, state: StreamState) -> None:
        """Ask the producer to stop; its end comes as any other end."""
        ...


class StreamState:
    """The consumer's end: what arrived and is not read yet, and how it ended.

    Attributes:
        id: Number of the stream on its link.
        label: ``Class.method`` and the actor's name, for errors.
        arguments: The bound arguments.
        contract: The method's contract.
    """

    def __init__(
        self, source: StreamSource, label: str, window: int, window_bytes: int, cancel_s: float
    ) -> None:
        self.id = 0
        self.label = label
        self.window = window
        self.window_bytes = window_bytes
        self.cancel_timeout_s = cancel_s
        self.source = source
        self.contract: Any = None
        self.arguments: Any = None
        self.opened = False
        self.ended = False
        self.cancelled = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._items: collections.deque[tuple[Any, int]] = collections.deque()
        self._read_items = 0
        self._read_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._end_waiters: list[asyncio.Future[None]] = []

    def push(self, item: object, size: int) -> None:
        """An item arrived."""
        self._items.append((item, size))
        self._wake()

    def end(self, error: BaseException | None) -> None:
        """The stream is over; what arrived before stays to be read. Only the first end counts."""
        if self.ended:
            return
        self.ended = True
        self._error = error
        self._wake()
        for waiter in self._end_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._end_waiters.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Any:
        """The next item.

        Raises:
            StopAsyncIteration: The producer ended.
            RuntimeError: Another task is waiting for the next item.
            Exception: What the producer raised, or why the stream broke.
        """
        if not self.opened:
            self.opened = True
            self.loop = asyncio.get_running_loop()
            self.source.open_stream(self)
        while not self._items:
            if self.ended:
                raise self._ending()
            await self._wait()
        item, size = self._items.popleft()
        self._read(size)
        return item

    def _ending(self) -> BaseException:
        error, self._error = self._error, None
        if error is not None:
            return error
        if self.cancelled:
            return ActorStreamError(f"{self.label}: the stream was left; it has no next item")
        return StopAsyncIteration()

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError(f"{self.label}: two tasks read from one stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except BaseException:
            self._waiter = None
            # As with an async generator, cancelling the reader ends the stream.
            await self.leave()
            raise
        self._waiter = None

    def _read(self, size: int) -> None:
        self._read_items += 1
        self._read_bytes += size
        if self.ended:
            return
        if self._read_items * 2 >= self.window or self._read_bytes * 4 >= self.window_bytes:
            self.source.grant(self, self._read_items)
            self._read_items = 0
            self._read_bytes = 0

    def abandon(self) -> None:
        """Cancel the producer without waiting; what it sent is dropped."""
        if self.opened and not self.ended and not self.cancelled:
            self.cancelled = True
            self.source.cancel_stream(self)
        elif not self.opened:
            self.opened = self.ended = self.cancelled = True
        self._items.clear()

    async def leave(self) -> None:
        """Cancel the producer and wait, bounded, until it has ended."""
        self.abandon()
        if not self.ended:
            waiter = asyncio.get_running_loop().create_future()
            self._end_waiters.append(waiter)
            with anyio.move_on_after(self.cancel_timeout_s, shield=True):
                await waiter
        self._items.clear()
        self._error = None


class ActorStream(AsyncIterator[Any]):
    """Items of a remote async generator, in its order.

    Iterate it; the producer starts with the first item asked for. Dropping it early (``break``),
    :meth:`aclose`, leaving its ``async with``, and cancelling the reader all cancel the producer,
    whose generator is then closed. One task reads at a time.
    """

    def __init__(self, state: StreamState) -> None:
        self._state = state

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await self._state.next()

    async def aclose(self) -> None:
        """Cancel the producer and wait until it has ended, at most `cancel_timeout_s`."""
        await self._state.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        state = self._state
        if not state.opened or state.ended or state.cancelled or state.loop is None:
            return
        # The loop may be closed, or this may be another thread: collection happens anywhere.
        with contextlib.suppress(RuntimeError):
            state.loop.call_soon_threadsafe(state.abandon)
