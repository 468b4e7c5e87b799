"""Any value through frames and back: equal to the last bit, or refused by its path."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.actors import messages
from gymrl.actors.codec import ARRAY_CODE, ValueDecoder
from gymrl.actors.frames import FrameReader, FrameWriter
from gymrl.actors.large_bytes import LARGE_BYTES
from gymrl.errors import EncodeError, ProtocolError

LIMIT = 1 << 26
EDGES = [0, -1, 127, 128, 255, 256, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63)]

floats = st.floats(allow_nan=True, allow_infinity=True, width=64) | st.sampled_from(
    [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308]
)
ints = st.sampled_from(EDGES) | st.integers(-(2**63), 2**64 - 1)
texts = st.text(max_size=20) | st.sampled_from(["\0", "\ufeff", "a\r\nb", "\U0001f600", "\uffff"])
leaves = st.none() | st.booleans() | ints | floats | texts | st.binary(max_size=40)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=25,
)


class Record(msgspec.Struct, frozen=True):
    count: int
    score: float
    name: str
    body: bytes
    parts: list[bytes]
    extra: Any = None


def crossed(value: object, type_: Any = Any, piece: int = 1 << 30) -> Any:
    """`value` as the other side of a link gets it, when its bytes come in pieces."""
    writer = FrameWriter(LIMIT)
    writer.write(messages.Result(1), value, with_bytes=True)
    decoder = ValueDecoder()
    compiled = decoder.compile(type_)
    got: list[Any] = []
    reader = FrameReader(
        {}, lambda head, payload, region, size: got.append(decoder.decode(payload, region, compiled)), LIMIT
    )  # fmt: skip
    for part in writer.take():
        data = memoryview(part)
        while data:
            buffer = reader.get_buffer()
            count = min(len(buffer), len(data), piece)
            buffer[:count] = data[:count]
            reader.advance(count)
            data = data[count:]
    assert reader.end() is None
    assert len(got) == 1
    return got[0]


def bits(value: Any) -> Any:
    """A value in which every float is its bits, so that NaN equals itself and 0.0 not -0.0."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, bool) or value is None:
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, msgspec.Struct):
        return [bits(getattr(value, name)) for name in value.__struct_fields__]
    return (type(value).__name__, value)


@settings(max_examples=60, deadline=None)
@given(values, st.integers(1, 300))
def test_values_come_back_to_the_last_bit_in_any_pieces(value, piece):
    assert bits(crossed(value, piece=piece)) == bits(value)


@settings(max_examples=50, deadline=None)
@given(
    ints.filter(lambda n: n < 2**63),
    floats,
    texts,
    st.lists(st.integers(0, 3).map(lambda n: bytes(n * LARGE_BYTES // 2)), max_size=4),
    values,
)
def test_structs_come_back_to_the_last_bit_with_their_large_parts(count, score, name, parts, extra):
    record = Record(count, score, name, b"".join(parts), parts, extra)
    assert bits(crossed(record, Record)) == bits(record)


@settings(max_examples=60, deadline=None)
@given(st.lists(floats, max_size=30))
def test_floats_in_arrays_keep_their_bits(numbers):
    array = np.array(numbers, np.float64)
    assert crossed(array).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "size",
    [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 256 << 10, (256 << 10) + 1, 5_000_000],
)
def test_buffers_of_every_size_come_back(size):
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    record = Record(size, 0.5, "n", body, [body[:100], b"", body])
    assert crossed(record, Record, 70_000) == record
    np.testing.assert_array_equal(
        crossed(np.frombuffer(body, np.uint8)), np.frombuffer(body, np.uint8)
    )


@settings(max_examples=100, deadline=None)
@given(
    st.integers(min_value=2**64) | st.integers(max_value=-(2**63) - 1),
    st.lists(st.sampled_from("ld"), max_size=8),
)
def test_integers_beyond_64_bits_are_refused_by_their_path(number, way):
    value, path = wrapped(number, way)
    with pytest.raises(EncodeError) as refused:
        crossed(value)
    assert refused.value.path == path
    assert len(str(refused.value)) < 1000


@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=10),
    st.characters(categories=["Cs"]),
    st.text(max_size=10),
    st.lists(st.sampled_from("ld"), max_size=8),
)
def test_lone_surrogates_are_refused_by_their_path(before, surrogate, after, way):
    value, path = wrapped(before + surrogate + after, way)
    with pytest.raises(EncodeError, match="surrogate") as refused:
        crossed(value)
    assert refused.value.path == path


def wrapped(value: object, way: list[str]) -> tuple[object, str]:
    path = ""
    for step in way:
        if step == "l":
            value, path = [0, value], f"[1]{path}"
        else:
            value, path = {"a": 1, "k": value}, f"['k']{path}"
    return value, f"value{path}"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.booleans())
def test_nesting_that_fits_comes_back(depth, in_dicts):
    value: Any = 1.5
    for _ in range(depth):
        value = {"k": value} if in_dicts else [value]
    assert crossed(value) == value


@settings(max_examples=8, deadline=None)
@given(st.integers(2000, 60_000), st.booleans())
def test_nesting_that_does_not_fit_is_refused_without_a_crash(depth, in_dicts):
    value: Any = 1.5
    for _ in range(depth):
        value = {"k": value} if in_dicts else [value]
    with pytest.raises(EncodeError) as refused:
        crossed(value)
    assert len(str(refused.value)) < 1000
    while isinstance(value, (dict, list)):  # taken apart here, where recursion is no matter
        value = value["k"] if isinstance(value, dict) else value[0]


@pytest.mark.parametrize("dtype", ["S0", "U0"])
def test_items_of_no_size_ask_for_no_memory(dtype):
    # NumPy makes such items a byte long: a description of a few bytes asked for terabytes.
    kind = dtype[0]
    name = f"|{kind}0".encode() if kind == "S" else b"<U0"
    description = struct.pack(f"<QBB{len(name)}sQ", 0, len(name), 1, name, 2**42)
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(ARRAY_CODE, description))
    decoder = ValueDecoder()
    for region in (None, memoryview(bytes(64))):
        with pytest.raises(ProtocolError, match="no size"):
            decoder.decode(payload, region, decoder.compile(Any))
    sizeless = np.ndarray((3,), np.dtype([("a", dtype)]))["a"]
    if sizeless.itemsize == 0:
        with pytest.raises(EncodeError, match="do not travel"):
            crossed(sizeless)
