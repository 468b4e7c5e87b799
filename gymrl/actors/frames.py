"""Frames: a message, its payload and its arrays, as bytes of a link.

::

    magic u16 | flags u16 | head u32 | payload u64 | region u64 || head || payload || pad || region

A frame with the flag `SEGMENT` carries, after its head, the number and size of a shared segment in
which payload and region lie instead. Every length is checked against the limit before anything is
allocated. Writing gathers small frames in one buffer, so that a burst of messages is one write;
large ``bytes`` go beside it, uncopied.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
import numpy as np

from gymrl.actors.codec import (
    DECODE_FAULTS,
    ENCODE_FAULTS,
    ValueEncoder,
    aligned,
    raw_bytes,
)
from gymrl.actors.large_bytes import LARGE_BYTES, LargeBytes, splice
from gymrl.actors.messages import Message
from gymrl.errors import EncodeError, FrameTooLargeError, ProtocolError, TornFrameError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gymrl.actors.segments import SegmentReceiver, SegmentSender

    Handler = Callable[[Any, memoryview, memoryview | None, int], None]

HEADER = struct.Struct("<HHIQQ")
MAGIC = 0x4E67
SEGMENT = 1
_REFERENCE = struct.Struct("<QQ")
_HEADER_SIZE: Final = HEADER.size
_BLANK = bytes(HEADER.size)
_unpack_header = HEADER.unpack_from
_pack_header = HEADER.pack_into
_MAX_HEAD = 64 << 10
_RING = 256 << 10
ABSENT: Final = object()


class FrameWriter:
    """Appends frames to what is to be sent next.

    Args:
        max_bytes: Limit of one frame.
        segment_bytes: Frames at least this large go through shared memory.
        segments: Where shared memory comes from; None: everything goes inline.
    """

    def __init__(
        self, max_bytes: int, segment_bytes: int = 0, segments: SegmentSender | None = None
    ) -> None:
        self.segments = segments
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes if segments is not None else max_bytes
        self._values = ValueEncoder()
        self._encode_head = msgspec.msgpack.Encoder().encode_into
        self._large = LargeBytes()
        self._out = bytearray()
        self._sealed: list[bytes | bytearray] = []

    def waits_with(self, size: int) -> bool:
        """Whether at least so many bytes wait to be sent, or anything large."""
        return len(self._out) >= size or bool(self._sealed)

    def take(self) -> list[bytes | bytearray]:
        """All that waits to be sent, in order; it belongs to the caller."""
        out, self._out = self._out, bytearray()
        if not self._sealed:
            return [out] if out else []
        parts, self._sealed = self._sealed, []
        if out:
            parts.append(out)
        return parts

    def write(
        self, head: Message, value: object = ABSENT, root: str = "value", with_bytes: bool = False
    ) -> int:
        """Append one frame.

        Args:
            head: The message.
            value: Its payload, when it has one.
            root: What the path in an error begins with.
            with_bytes: Look for large ``bytes`` in the value and spare them a copy.

        Returns:
            The frame's size in bytes, wherever they lie.

        Raises:
            EncodeError: The value cannot travel. Nothing was appended.
            FrameTooLargeError: It is over the limit. Nothing was appended.
        """
        out = self._out
        start = len(out)
        out += _BLANK
        try:
            self._encode_head(head, out, -1)
            head_end = len(out)
            if head_end - start > _MAX_HEAD:
                _refuse_head(head_end - start)
            taken: dict[bytes, bytes] | None = None
            if value is not ABSENT:
                if with_bytes:
                    taken = {}
                    value = self._large.lift(value, taken)
                self._values.encode_into(value, out, root)
                if taken or self._values.arrays or len(out) - head_end >= self._segment_bytes:
                    return self._write_large(start, head_end, taken or {}, root)
            end = len(out)
            if end - start > self._max_bytes:
                self._check(end - start, root)
            _pack_header(out, start, MAGIC, 0, head_end - start - _HEADER_SIZE, end - head_end, 0)
            return end - start
        except BaseException as error:
            del out[start:]
            if isinstance(error, ENCODE_FAULTS) and not isinstance(error, EncodeError):
                raise EncodeError(f"{root} cannot travel: {error}", path=root) from error
            raise

    def _check(self, size: int, root: str) -> None:
        if size > self._max_bytes:
            raise FrameTooLargeError(
                f"a message of {size} bytes ({root}) is over the limit of {self._max_bytes} "
                "(SpawnOptions.max_frame_bytes)",
                size=size,
                limit=self._max_bytes,
            )

    def _write_large(self, start: int, head_end: int, taken: dict[bytes, bytes], root: str) -> int:
        out = self._out
        pieces: list[bytes] | None = None
        payload = len(out) - head_end
        if taken:
            pieces = splice(bytes(out[head_end:]), taken)
            payload = sum(map(len, pieces))
        region = self._values.region_size
        head = head_end - start - HEADER.size
        size = _frame_size(head, payload, region)
        self._check(size, root)
        if self.segments is not None and payload + region >= self._segment_bytes:
            in_segment = aligned(payload) + region
            if self._write_segment(start, head_end, pieces, payload, in_segment):
                return size
        if pieces is not None:
            del out[head_end:]
        HEADER.pack_into(out, start, MAGIC, 0, head, payload, region)
        for piece in pieces or ():
            self._append(piece)
        if region:
            self._append_region(
                aligned(HEADER.size + head + payload) - HEADER.size - head - payload
            )
        self._values.arrays = []
        return size

    def _append(self, part: bytes) -> None:
        if len(part) >= LARGE_BYTES:
            self._sealed += (self._out, part)
            self._out = bytearray()
        else:
            self._out += part

    def _append_region(self, padding: int) -> None:
        self._out += bytes(padding)
        written = 0
        for offset, array in self._values.arrays:
            self._out += bytes(offset - written)
            # A snapshot: the caller may write to the array before the link has taken it.
            self._out += raw_bytes(array)
            written = offset + array.nbytes

    def _write_segment(
        self, start: int, head_end: int, pieces: list[bytes] | None, payload: int, size: int
    ) -> bool:
        assert self.segments is not None
        segment = self.segments.acquire(size)
        if segment is None:
            return False
        out, memory = self._out, segment.memory
        if pieces is None:
            with memoryview(out) as view:
                memory[:payload] = view[head_end:]
        else:
            place = 0
            for piece in pieces:
                memory[place : place + len(piece)] = piece
                place += len(piece)
        base = aligned(payload)
        for offset, array in self._values.arrays:
            memory[base + offset : base + offset + array.nbytes] = raw_bytes(array)
        self._values.arrays = []
        del out[head_end:]
        out += _REFERENCE.pack(segment.number, size)
        region = self._values.region_size
        head = head_end - start - HEADER.size
        HEADER.pack_into(out, start, MAGIC, SEGMENT, head, payload, region)
        return True


def _refuse_head(size: int) -> NoReturn:
    raise FrameTooLargeError(
        f"a message without its payload takes {size} bytes, over the limit of {_MAX_HEAD}; names "
        "of methods, classes and files are meant to be short",
        size=size,
        limit=_MAX_HEAD,
    )


def _frame_size(head: int, payload: int, region: int) -> int:
    size = HEADER.size + head + payload
    return aligned(size) + region if region else size


class FrameReader:
    """Cuts what arrives into frames.

    Args:
        handlers: By type of message: called with the message, its payload (valid during the call
            only), the region of its arrays and the frame's size. May change at any time.
        otherwise: The same for other types.
        max_bytes: Limit of one frame, checked before it is allocated.
        segments: Where shared segments are found; None: there are none on this link.
    """

    def __init__(
        self,
        handlers: Mapping[type, Handler],
        otherwise: Handler,
        max_bytes: int,
        segments: SegmentReceiver | None = None,
    ) -> None:
        self._handlers = handlers
        self._otherwise = otherwise
        self._max_bytes = max_bytes
        self._segments = segments
        self._heads: Callable[[memoryview], Message] = msgspec.msgpack.Decoder(Message).decode
        self._ring = memoryview(bytearray(_RING))
        self._start = 0
        self._end = 0
        self._large: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._large_end = 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; at least one."""
        if self._large is not None:
            return self._large.data[self._large_end :]
        return self._ring[self._end :]

    def advance(self, count: int) -> None:
        """`count` bytes were put into the buffer: deliver the frames that are now whole.

        Raises:
            ProtocolError: The bytes are no frame. The link is of no more use.
            FrameTooLargeError: A frame announces more than the limit.
        """
        if self._large is not None:
            self._large_end += count
            if self._large_end < len(self._large):
                return
            whole, self._large = self._large, None
            whole.flags.writeable = False
            _, flags, head, payload, region = HEADER.unpack_from(whole.data)
            self._take(whole.data, 0, (flags, head, payload, region, whole.nbytes), owned=True)
            return
        self._end += count
        self._cut()

    def _cut(self) -> None:
        ring, limit = self._ring, self._max_bytes
        start, end = self._start, self._end
        while end - start >= _HEADER_SIZE:
            magic, flags, head, payload, region = _unpack_header(ring, start)
            size = _HEADER_SIZE + head + payload
            plain = not (flags or region)
            if not plain or magic != MAGIC or not 0 < head <= _MAX_HEAD or size > limit:
                size = self._checked_size(magic, flags, head, payload, region)
            if size > end - start:
                if size > _RING // 2:
                    self._begin_large(start, end, size)
                    return
                break
            # Moved on first: what the message leads to may look at the state.
            self._start = start + size
            if plain:
                body = start + _HEADER_SIZE + head
                message = self._head(ring[start + _HEADER_SIZE : body])
                deliver = self._handlers.get(type(message), self._otherwise)
                deliver(message, ring[body : start + size], None, size)
            else:
                self._take(ring, start, (flags, head, payload, region, size), owned=False)
            start += size
        if start == end:
            self._start = self._end = 0
        elif start > _RING // 2:
            ring[: end - start] = ring[start:end]
            self._start, self._end = 0, end - start

    def _begin_large(self, start: int, end: int, size: int) -> None:
        have = end - start
        large = np.empty(size, np.uint8)
        large.data[:have] = self._ring[start:end]
        self._large, self._large_end = large, have
        self._start = self._end = 0

    def _head(self, data: memoryview) -> Message:
        try:
            return self._heads(data)
        except DECODE_FAULTS as error:
            raise ProtocolError(f"a message does not decode: {error}") from error

    def _checked_size(self, magic: int, flags: int, head: int, payload: int, region: int) -> int:
        """How many bytes of the link the frame takes."""
        if magic != MAGIC or flags & ~SEGMENT or not 0 < head <= _MAX_HEAD:
            raise ProtocolError("the other side of the link does not speak gymrl's protocol")
        size = HEADER.size + head + payload
        if region:
            size = aligned(size) + region
        if size > self._max_bytes:
            raise FrameTooLargeError(
                f"the other side announces a message of {size} bytes; the limit is "
                f"{self._max_bytes} (SpawnOptions.max_frame_bytes)",
                size=size,
                limit=self._max_bytes,
            )
        return HEADER.size + head + _REFERENCE.size if flags & SEGMENT else size

    def _take(
        self, data: memoryview, start: int, sizes: tuple[int, int, int, int, int], owned: bool
    ) -> None:
        flags, head_size, payload, region, size = sizes
        body = start + HEADER.size + head_size
        head = self._head(data[start + HEADER.size : body])
        deliver = self._handlers.get(type(head), self._otherwise)
        if flags & SEGMENT:
            shared = self._shared(data, body, payload, region)
            base = aligned(payload)
            arrays = shared[base:] if region else None
            deliver(head, shared[:payload], arrays, payload + region)
        elif not region:
            deliver(head, data[body : body + payload], None, size)
        else:
            if not owned:
                # Arrays are views and outlive the ring: they get this frame's bytes alone.
                data = memoryview(bytes(data[start : start + size]))
                body -= start
            base = aligned(HEADER.size + head_size + payload)
            deliver(head, data[body : body + payload], data[base : base + region], size)

    def _shared(self, data: memoryview, body: int, payload: int, region: int) -> memoryview:
        number, size = _REFERENCE.unpack_from(data, body)
        expected = aligned(payload) + region
        if self._segments is None or size != expected:
            raise ProtocolError(f"a message refers to a shared segment of {size} bytes it may not")
        return self._segments.view(number, size)

    def end(self) -> TornFrameError | None:
        """The link has ended; an error if that was inside a frame."""
        if self._large is not None:
            received, expected = self._large_end, len(self._large)
        elif self._end > self._start:
            received, expected = self._end - self._start, None
            if received >= HEADER.size:
                expected = self._checked_size(*HEADER.unpack_from(self._ring, self._start))
        else:
            return None
        known = f" of {expected}" if expected is not None else ""
        return TornFrameError(
            f"the link ended after {received}{known} bytes of a message",
            received=received,
            expected=expected,
        )
