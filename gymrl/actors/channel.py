"""A link between two processes: frames over a socket, gathered into few writes.

Sending never waits and is never half done, so it cannot be torn by a cancellation; a sender that
should wait for a slow reader asks :meth:`Channel.drain` first. What arrives is decoded and handed
on inside the event loop's own read callback, without a task or a queue in between.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
from typing import TYPE_CHECKING, cast

from gymrl.actors.frames import ABSENT, FrameReader, FrameWriter
from gymrl.actors.messages import Forget, Message, Release
from gymrl.actors.segments import SegmentReceiver, SegmentSender
from gymrl.errors import ActorClosedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.actors.frames import Handler
    from gymrl.actors.options import SpawnOptions

# A burst is sent in parts of this size, so that the other side works while this one still writes.
_FLUSH_BYTES = 16 << 10
_HIGH_WATER = 4 << 20
_SOCKET_BUFFER = 1 << 20


class Channel(asyncio.BufferedProtocol):
    """One end of a link.

    Args:
        options: Limits.
        lane: A Unix socket for shared segments; None on links between nodes.
        on_message: Called in the event loop with each message that `handlers` has no entry for,
            its payload (valid during the call only), the region of its arrays, and its size in
            bytes. Neither it nor a handler may raise.
        on_lost: Called once, when the link has ended: with the error, or None at a clean end.

    Attributes:
        handlers: Who gets which type of message; add to it.
        is_lost: Whether the link has ended.
        received: Bytes that came over the socket so far.
        sent: Bytes of all messages sent so far, over the socket or through shared memory.
    """

    def __init__(
        self,
        options: SpawnOptions,
        lane: socket.socket | None,
        on_message: Handler,
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.handlers: dict[type, Handler] = {
            Release: self._on_release,
            Forget: self._on_forget,
        }
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._released: collections.deque[int] = collections.deque()
        self._sender: SegmentSender | None = None
        self._receiver: SegmentReceiver | None = None
        if lane is not None:
            self._sender = SegmentSender(lane, options.max_segment_bytes)
            self._receiver = SegmentReceiver(lane, self._segment_is_free)
        self._writer = FrameWriter(
            options.max_frame_bytes,
            options.segment_bytes,
            self._sender if options.max_segment_bytes else None,
        )
        self._reader = FrameReader(
            self.handlers, on_message, options.max_frame_bytes, self._receiver
        )
        self._corked = False
        self._answering = True
        self._drained: asyncio.Event | None = None
        self._error: Exception | None = None
        self.is_lost = False
        self.received = 0
        self.sent = 0

    @classmethod
    async def over(
        cls,
        sock: socket.socket,
        options: SpawnOptions,
        lane: socket.socket | None,
        on_message: Handler,
        on_lost: Callable[[Exception | None], None],
    ) -> Channel:
        """Take over a connected socket and its lane; both are closed with the channel."""
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
        if lane is not None:
            lane.setblocking(False)
        loop = asyncio.get_running_loop()
        channel = cls(options, lane, on_message, on_lost)
        if sock.family == socket.AF_UNIX:
            await loop.create_unix_connection(lambda: channel, sock=sock)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.create_connection(lambda: channel, sock=sock)
        return channel

    # --- sending -------------------------------------------------------------------------------

    def send(
        self, head: Message, value: object = ABSENT, root: str = "value", with_bytes: bool = False
    ) -> int:
        """Send one message, soon; see :meth:`FrameWriter.write`.

        Raises:
            ActorClosedError: The link is gone.
            EncodeError: The value cannot travel; nothing is sent.
            FrameTooLargeError: It is over the limit; nothing is sent.
        """
        if self.is_lost or self._transport is None:
            raise ActorClosedError("the link to the other process is gone")
        size = self._writer.write(head, value, root, with_bytes)
        self.sent += size
        if self._corked:
            if self._writer.waits_with(_FLUSH_BYTES):
                self._flush()
        elif self._answering:
            # The first message since something came: someone may be waiting for just this one.
            self._answering = False
            self._flush()
        else:
            # What is sent in the rest of this turn of the loop goes together.
            self._corked = True
            self._loop.call_soon(self._uncork)
        return size

    def _uncork(self) -> None:
        self._corked = False
        if self._writer.waits_with(1):
            self._flush()

    def _flush(self) -> None:
        if self.is_lost or self._transport is None:
            return
        if self._released or (self._sender is not None and self._sender.forgotten):
            self._write_notices()
        write = self._transport.write
        for part in self._writer.take():
            write(part)

    def _write_notices(self) -> None:
        numbers: list[int] = []
        while self._released:
            numbers.append(self._released.popleft())
        if numbers:
            self._writer.write(Release(numbers))
        if self._sender is not None and self._sender.forgotten:
            forgotten, self._sender.forgotten = self._sender.forgotten, []
            self._writer.write(Forget(forgotten))

    def _segment_is_free(self, number: int) -> None:
        # Called wherever an array is collected, another thread included.
        self._released.append(number)
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the other side
            self._loop.call_soon_threadsafe(self._flush)

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be sent that a sender had better :meth:`drain` first."""
        return self._drained is not None

    async def drain(self) -> None:
        """Wait until the other side has read enough; returns at once when the link is gone."""
        while self._drained is not None:
            await self._drained.wait()

    # --- the event loop's callbacks --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is ours."""
        # uvloop's transports are no asyncio.Transport by class, but they are by behaviour.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the loop puts the next bytes."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """The loop has put `nbytes` there."""
        self.received += nbytes
        self._answering = True
        try:
            self._reader.advance(nbytes)
        except ProtocolError as error:
            self.abort(error)
        except MemoryError:
            self.abort(ProtocolError("there is no memory for a message of the other side"))

    def _on_release(
        self, head: Release, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        if self._sender is not None:
            self._sender.release(head.segments)

    def _on_forget(
        self, head: Forget, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        if self._receiver is not None:
            self._receiver.forget(head.segments)

    def eof_received(self) -> bool:
        """The other side has closed."""
        return False

    def pause_writing(self) -> None:
        """The transport holds much that is not sent yet."""
        self._drained = asyncio.Event()

    def resume_writing(self) -> None:
        """It was sent."""
        drained, self._drained = self._drained, None
        if drained is not None:
            drained.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The link has ended."""
        if self.is_lost:
            return
        self.is_lost = True
        self.resume_writing()
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
        error = self._error
        if error is None:
            try:
                error = self._reader.end() or exc
            except ProtocolError as fault:
                error = fault
        self._on_lost(error)

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what waits, then close."""
        if self._transport is not None and not self.is_lost:
            self._flush()
            self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """Close at once; `error` becomes the reason that `on_lost` is told."""
        if self._error is None:
            self._error = error
        if self._transport is not None and not self.is_lost:
            self._transport.abort()
