"""Shared segments: used again, released with the last array, never left behind."""

from __future__ import annotations

import collections
import gc
import os
import socket

import numpy as np
import pytest

from gymrl.actors.segments import SegmentReceiver, SegmentSender
from gymrl.errors import ProtocolError


@pytest.fixture
def lanes():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_what_is_written_is_seen_read_only_and_released_with_the_last_view(lanes):
    released: list[int] = []
    sender, receiver = SegmentSender(lanes[0], 1 << 30), SegmentReceiver(lanes[1], released.append)
    segment = sender.acquire(100)
    segment.memory[:5] = b"hello"
    view = receiver.view(segment.number, 100)
    array = np.frombuffer(view, np.uint8, 5)
    assert array.tobytes() == b"hello"
    assert not array.flags.writeable
    del view
    part = array[1:3]
    del array
    gc.collect()
    assert released == []
    del part
    gc.collect()
    assert released == [segment.number]
    sender.release(released)
    assert sender.acquire(100) is segment
    sender.close()


def test_nothing_appears_in_dev_shm(lanes):
    # As this process maps it: others may put into the folder what they like.
    before = mappings()
    sender = SegmentSender(lanes[0], 1 << 30)
    assert sender.acquire(1 << 20) is not None
    assert mappings() - before == {"/memfd:gymrl": 1}
    sender.close()


def mappings() -> collections.Counter[str]:
    """The files that this process has mapped, of those that are memory alone."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        names = [line.split(maxsplit=5)[5:] for line in file]
    return collections.Counter(
        name[0].removesuffix(" (deleted)\n")
        for name in names
        if name and name[0].startswith(("/memfd:", "/dev/shm/"))
    )


def test_the_limit_counts_all_segments_and_idle_ones_give_way(lanes):
    sender = SegmentSender(lanes[0], 8 << 20)
    first = sender.acquire(3 << 20)
    assert first is not None
    assert sender.acquire(6 << 20) is None
    sender.release([first.number])
    small = sender.acquire(1 << 17)
    assert small is not None
    assert sender.forgotten == []
    assert sender.acquire(5 << 20) is not None
    assert sender.forgotten == [first.number]
    sender.close()


def test_a_full_lane_is_no_error(lanes):
    sender = SegmentSender(lanes[0], 1 << 40)
    made = [sender.acquire(1 << 20) for _ in range(2000)]
    assert made[0] is not None
    assert made[-1] is None
    sender.close()


def test_an_unknown_segment_and_a_false_size_are_refused(lanes):
    sender, receiver = SegmentSender(lanes[0], 1 << 30), SegmentReceiver(lanes[1], print)
    with pytest.raises(ProtocolError, match="did not arrive"):
        receiver.view(1, 10)
    segment = sender.acquire(10)
    with pytest.raises(ProtocolError, match="not in segment"):
        receiver.view(segment.number, 2 << 20)
    receiver.forget([segment.number])
    with pytest.raises(ProtocolError):
        receiver.view(segment.number, 10)
    sender.close()


def test_memory_that_cannot_be_shared_is_refused(lanes):
    receiver = SegmentReceiver(lanes[1], print)
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, 4096)
    socket.send_fds(lanes[0], [bytes(8)], [descriptor])
    os.close(descriptor)
    with pytest.raises(ProtocolError, match="not sealed"):
        receiver.view(0, 10)
