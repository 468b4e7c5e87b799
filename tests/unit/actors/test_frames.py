"""Frames: gathered, cut, bounded; broken ones are told apart and typed."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.actors import messages
from gymrl.actors.codec import ValueDecoder
from gymrl.actors.frames import (
    HEADER,
    MAGIC,
    SEGMENT,
    FrameReader,
    FrameWriter,
)
from gymrl.actors.large_bytes import LARGE_BYTES, LargeBytes, splice
from gymrl.errors import EncodeError, FrameTooLargeError, ProtocolError, TornFrameError

LIMIT = 1 << 22


class Body(msgspec.Struct, frozen=True):
    data: bytes
    name: str = ""


class Receiver:
    """Feeds bytes to a reader in pieces, and keeps the decoded values."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.received: list[tuple[Any, Any]] = []
        self.decoder = ValueDecoder()
        self.compiled = self.decoder.compile(Any)
        self.reader = FrameReader({}, self.deliver, limit)

    def deliver(self, head, payload, region, size):
        value = self.decoder.decode(payload, region, self.compiled) if payload else None
        self.received.append((head, value))

    def feed(self, data: bytes, piece: int = 1 << 30) -> None:
        while data:
            buffer = self.reader.get_buffer()
            assert len(buffer) > 0
            count = min(len(buffer), len(data), piece)
            buffer[:count] = data[:count]
            self.reader.advance(count)
            data = data[count:]


def written(*values: object, **options: Any) -> bytes:
    writer = FrameWriter(LIMIT)
    for number, value in enumerate(values):
        writer.write(messages.Result(number), value, **options)
    return b"".join(writer.take())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=3000) | st.lists(st.integers(0, 9), max_size=50), max_size=10),
    st.integers(1, 5000),
)
def test_frames_are_cut_right_whatever_the_pieces(values, piece):
    receiver = Receiver()
    receiver.feed(written(*values), piece)
    assert [head.id for head, _ in receiver.received] == list(range(len(values)))
    assert [value for _, value in receiver.received] == values
    assert receiver.reader.end() is None


@pytest.mark.parametrize("size", [10, 1000, 100_000, 140_000, 1_000_000])
@pytest.mark.parametrize("piece", [7001, 1 << 30])
def test_frames_around_the_size_of_the_ring_arrive_with_their_arrays(size, piece):
    array = np.arange(size, dtype=np.uint8)
    receiver = Receiver()
    receiver.feed(written({"a": array, "b": array[::-1]}, [size], {"c": array}), piece)
    first, second, third = (value for _, value in receiver.received)
    np.testing.assert_array_equal(first["a"], array)
    np.testing.assert_array_equal(first["b"], array[::-1])
    assert second == [size]
    np.testing.assert_array_equal(third["c"], array)
    assert not third["c"].flags.writeable


def test_arrays_do_not_look_at_the_reused_ring():
    receiver = Receiver()
    receiver.feed(written(np.full(100, 1)))
    kept = receiver.received[0][1]
    receiver.feed(written(*[np.full(100, 2)] * 400))
    assert int(kept.sum()) == 100


def test_large_bytes_are_lifted_out_and_arrive_in_place():
    large, other = b"x" * LARGE_BYTES, b"y" * (LARGE_BYTES + 1)
    value = [Body(large, "a"), {"k": [other, 1], "s": b"small"}, (large,), Body(b"tiny")]
    receiver = Receiver()
    receiver.feed(written(value, with_bytes=True))
    assert receiver.received[0][1] == [
        {"data": large, "name": "a"},
        {"k": [other, 1], "s": b"small"},
        [large],
        {"data": b"tiny", "name": ""},
    ]
    assert value[0].data is large


class Inner(msgspec.Struct):
    """Bytes beside what holds none."""

    text: str
    data: bytes


class Outer(msgspec.Struct):
    """Holds bytes two levels down, beside a free field that holds some by chance."""

    inner: tuple[Inner | None, ...]
    free: dict[str, Any]


def test_large_bytes_are_lifted_where_an_annotation_declares_them_and_nowhere_else():
    blob = b"x" * LARGE_BYTES
    value = Outer((None, Inner("t", blob)), {"by chance": blob})
    taken: dict[bytes, bytes] = {}
    lifted = LargeBytes().lift(value, taken)
    assert list(taken.values()) == [blob]
    assert lifted.free == {"by chance": blob}
    assert lifted.inner[1].data in taken
    assert value.inner[1].data is blob


def test_lifting_leaves_values_without_large_bytes_alone():
    value = [Body(b"x"), {"a": (1, 2)}, list(range(10))]
    taken: dict[bytes, bytes] = {}
    assert LargeBytes().lift(value, taken) is value
    assert taken == {}


def test_splicing_gives_the_very_bytes_of_msgpack():
    blobs = {b"m" * 24: b"1" * 70_000, b"n" * 24: b"2" * 80_000}
    marked = msgspec.msgpack.encode([b"n" * 24, {"k": b"m" * 24}])
    plain = msgspec.msgpack.encode([b"2" * 80_000, {"k": b"1" * 70_000}])
    assert b"".join(splice(marked, blobs)) == plain
    assert any(piece is blobs[b"m" * 24] for piece in splice(marked, blobs))


def test_a_frame_over_the_limit_is_refused_by_the_writer_and_leaves_nothing():
    writer = FrameWriter(1 << 16)
    writer.write(messages.Result(1), "kept")
    for value in ("x" * (1 << 17), np.zeros(1 << 15), [b"x" * (1 << 17)]):
        with pytest.raises(FrameTooLargeError) as caught:
            writer.write(messages.Result(2), value, with_bytes=True)
        assert caught.value.size > caught.value.limit == 1 << 16
    with pytest.raises(EncodeError):
        writer.write(messages.Result(3), object())
    receiver = Receiver()
    receiver.feed(b"".join(writer.take()))
    assert receiver.received == [(messages.Result(1), "kept")]


def test_a_frame_over_the_limit_is_refused_by_the_reader_before_it_comes():
    receiver = Receiver(limit=1 << 16)
    with pytest.raises(FrameTooLargeError):
        receiver.feed(HEADER.pack(MAGIC, 0, 3, 1 << 17, 0))
    for payload, region in ((2**63, 0), (2**64 - 1, 2**64 - 1), (0, 2**62)):
        with pytest.raises(FrameTooLargeError):
            Receiver().feed(HEADER.pack(MAGIC, 0, 3, payload, region))


def test_bytes_of_another_protocol_are_refused():
    for garbage in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(64), b"\xff" * 64):
        with pytest.raises(ProtocolError):
            Receiver().feed(garbage)


def test_a_segment_that_is_not_of_this_link_is_refused():
    head = msgspec.msgpack.encode(messages.Result(1))
    frame = HEADER.pack(MAGIC, SEGMENT, len(head), 100, 0) + head + bytes(16)
    with pytest.raises(ProtocolError, match="segment"):
        Receiver().feed(frame)


@pytest.mark.parametrize("cut", [1, 20, 30, 200_000])
def test_a_link_that_ends_inside_a_frame_is_told_from_a_clean_end(cut):
    data = written(np.zeros(300_000, np.uint8))
    receiver = Receiver()
    receiver.feed(data[:cut])
    error = receiver.reader.end()
    assert isinstance(error, TornFrameError)
    assert error.received == cut
    assert error.expected in (None, len(data))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutated_and_truncated_frames_give_typed_errors_only(data):
    frame = bytearray(written({"a": [1, "two", b"three"], "n": np.arange(5)}, "next"))
    for _ in range(data.draw(st.integers(0, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    receiver = Receiver()
    try:
        receiver.feed(bytes(frame), data.draw(st.integers(1, 200)))
        torn = receiver.reader.end()
        assert torn is None or isinstance(torn, TornFrameError)
    except (ProtocolError, msgspec.ValidationError):
        pass


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_give_typed_errors_only(data):
    receiver = Receiver()
    with contextlib.suppress(ProtocolError):
        receiver.feed(data)


def test_every_message_survives_its_encoding():
    samples = [
        messages.Hello(1, 2),
        messages.Start("m", "q", None, False, "n"),
        messages.Ready(),
        messages.Refused(),
        messages.Call(1, "m"),
        messages.Open(1, "m", 2, 3),
        messages.Credit(1, 2),
        messages.Cancel(1),
        messages.Result(1),
        messages.Item(1),
        messages.End(1),
        messages.Failed(1),
        messages.Cancelled(1),
        messages.Close(1.5),
        messages.Closed(),
        messages.Ping(1),
        messages.Pong(1),
        messages.Release([1, 2]),
        messages.Forget([3]),
    ]
    writer = FrameWriter(LIMIT)
    for sample in samples:
        writer.write(sample)
    receiver = Receiver()
    receiver.feed(b"".join(writer.take()))
    assert [head for head, _ in receiver.received] == samples
    assert len({type(sample) for sample in samples}) == len(messages.Message.__args__)


def test_a_message_whose_own_fields_are_too_long_is_refused_by_the_writer():
    writer = FrameWriter(LIMIT)
    with pytest.raises(FrameTooLargeError, match="without its payload"):
        writer.write(messages.Start("m" * 70_000, "q", None, False, "n"))
    writer.write(messages.Result(1), "kept")
    receiver = Receiver()
    receiver.feed(b"".join(writer.take()))
    assert receiver.received == [(messages.Result(1), "kept")]


def test_a_frame_over_two_gibibytes_is_measured_right():
    # Lengths are 64-bit: nothing of a large frame is cut off or turns negative.
    receiver = Receiver(limit=4 << 30)
    head = msgspec.msgpack.encode(messages.Result(1))
    size = 3 << 30
    receiver.feed(HEADER.pack(MAGIC, 0, len(head), size, 0) + head + b"\xc6")
    room = receiver.reader.get_buffer()  # untouched memory, which costs nothing yet
    assert len(room) == size - 1
    torn = receiver.reader.end()
    assert isinstance(torn, TornFrameError)
    assert torn.expected == HEADER.size + len(head) + size
