"""Large messages through shared memory between two processes of one node.

A segment is an anonymous memory file (``memfd``) whose descriptor is passed over a socket pair, the
*lane*. It has no name: nothing is left in ``/dev/shm`` whatever way a process ends, there is
nothing to sweep, and the size of the ``/dev/shm`` mount does not matter. Segments are used again:
the receiver says when it no longer looks at one (when the last array over it is gone). When memory
or descriptors run out the sender falls back to sending inline.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import weakref
from typing import TYPE_CHECKING

import numpy as np

from gymrl.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

_ID = struct.Struct("<Q")
_GRAIN = 1 << 20
_MAX_IDLE_BYTES = 256 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """One shared segment on its owner's side."""

    def __init__(self, number: int, memory: mmap.mmap) -> None:
        self.number = number
        self.memory = memory
        self.size = len(memory)


class SegmentSender:
    """The segments of one direction: owned here, read on the other side.

    Args:
        lane: A non-blocking Unix socket over which descriptors go.
        max_bytes: All segments together; 0 turns shared memory off.
    """

    def __init__(self, lane: socket.socket, max_bytes: int) -> None:
        self._lane = lane
        self._max_bytes = max_bytes
        self._number = 0
        self._idle: dict[int, Segment] = {}
        self._busy: dict[int, Segment] = {}
        self._bytes = 0
        self.forgotten: list[int] = []

    def acquire(self, size: int) -> Segment | None:
        """A segment of at least `size` bytes, or None when none is to be had."""
        fitting = [s for s in self._idle.values() if size <= s.size <= 4 * size + _GRAIN]
        if fitting:
            segment = self._idle.pop(min(fitting, key=lambda s: s.size).number)
        else:
            made = self._make(-(-size // _GRAIN) * _GRAIN)
            if made is None:
                return None
            segment = made
        self._busy[segment.number] = segment
        return segment

    def _make(self, size: int) -> Segment | None:
        while self._bytes + size > self._max_bytes and self._idle:
            self._drop(next(iter(self._idle)))
        if self._bytes + size > self._max_bytes:
            return None
        try:
            descriptor = os.memfd_create("gymrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(descriptor, size)
            self._number += 1
            socket.send_fds(self._lane, [_ID.pack(self._number)], [descriptor])
        except OSError:
            return None  # no memory, no descriptors, or the lane is full: the message goes inline
        finally:
            os.close(descriptor)
        self._bytes += size
        return Segment(self._number, memory)

    def release(self, numbers: list[int]) -> None:
        """The other side no longer looks at these."""
        for number in numbers:
            segment = self._busy.pop(number, None)
            if segment is None:
                continue
            self._idle[number] = segment
        idle_bytes = sum(segment.size for segment in self._idle.values())
        for number in list(self._idle):
            if idle_bytes <= _MAX_IDLE_BYTES or len(self._idle) == 1:
                break
            idle_bytes -= self._idle[number].size
            self._drop(number)

    def _drop(self, number: int) -> None:
        segment = self._idle.pop(number)
        self._bytes -= segment.size
        segment.memory.close()
        self.forgotten.append(number)

    def close(self) -> None:
        """Unmap everything; what the other side still looks at stays valid there."""
        for segment in (*self._idle.values(), *self._busy.values()):
            segment.memory.close()
        self._idle.clear()
        self._busy.clear()
        self._bytes = 0
        self._lane.close()


class SegmentReceiver:
    """The segments of the other direction, mapped read-only.

    Args:
        lane: The same lane as the sender's on this side.
        on_release: Called with a segment's number when nothing here looks at it any more; from
            any thread, whenever objects are collected.
    """

    def __init__(self, lane: socket.socket, on_release: Callable[[int], None]) -> None:
        self._lane = lane
        self._on_release = on_release
        self._mapped: dict[int, mmap.mmap] = {}

    def view(self, number: int, size: int) -> memoryview:
        """The first `size` bytes of a segment, read-only; it is released when the view is gone.

        Raises:
            ProtocolError: There is no such segment, or it is smaller.
        """
        while number not in self._mapped:
            self._receive()
        memory = self._mapped[number]
        if not 0 < size <= len(memory):
            raise ProtocolError(f"a message of {size} bytes is not in segment {number}")
        lease = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(lease, self._on_release, number).atexit = False
        return lease.data

    def _receive(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._lane, _ID.size, 1)
        except OSError as error:
            raise ProtocolError(f"a shared segment did not arrive: {error}") from error
        try:
            if len(data) != _ID.size or len(descriptors) != 1:
                raise ProtocolError(
                    "a shared segment did not arrive (too many open files in this process?)"
                )
            seals = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise ProtocolError("a shared segment is not sealed")
            size = os.fstat(descriptors[0]).st_size
            memory = mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ)
            self._mapped[_ID.unpack(data)[0]] = memory
        except OSError as error:
            raise ProtocolError(f"a shared segment does not map: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def forget(self, numbers: list[int]) -> None:
        """Their owner has given these up; they are unmapped with the last view."""
        for number in numbers:
            self._mapped.pop(number, None)

    def close(self) -> None:
        """Let go of every mapping that no array looks at."""
        self._mapped.clear()
