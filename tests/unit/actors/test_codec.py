"""Values as bytes and back: equal, or a typed error that names the place."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gymrl.actors.codec import RoundTrip, ValueDecoder, ValueEncoder, find_obstacle
from gymrl.errors import EncodeError, ProtocolError

few = settings(max_examples=60, deadline=None)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
    max_leaves=20,
)
arrays = hnp.arrays(
    st.sampled_from(["i1", "<i4", ">i8", "f2", "f4", "f8", "?", "c8", "u2", "U3", "S2"]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


class Item(msgspec.Struct):
    ids: npt.NDArray[Any]
    note: str = ""


class Nested(msgspec.Struct):
    value: Any


@few
@given(plain)
def test_plain_values_come_back_equal(value):
    assert RoundTrip().round_trip(value, Any) == value


@few
@given(st.lists(arrays, max_size=4))
def test_arrays_come_back_with_dtype_shape_and_bits(values):
    back = RoundTrip().round_trip({"arrays": values}, dict[str, list[npt.NDArray[Any]]])
    for old, new in zip(values, back["arrays"], strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert new.tobytes() == old.tobytes()
        assert not new.flags.writeable


def test_arrays_without_a_layout_of_their_own_come_back_in_c_order():
    array = np.arange(12).reshape(3, 4)
    for view in (array.T, array[::-1], array[:, ::2], np.asfortranarray(array)):
        back = RoundTrip().round_trip(view, npt.NDArray[np.int64])
        np.testing.assert_array_equal(back, view)
        assert back.flags.c_contiguous


def test_not_a_number_and_infinity_survive():
    back = RoundTrip().round_trip([math.nan, math.inf, -math.inf, -0.0], list[float])
    assert math.isnan(back[0])
    assert back[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, back[3]) == -1


def test_numpy_scalars_arrive_as_plain_numbers():
    values = [np.int64(3), np.float32(0.5), np.bool_(True), np.str_("a")]
    assert RoundTrip().round_trip(values, Any) == [3, 0.5, True, "a"]


def test_structs_with_arrays_are_decoded_by_annotation():
    back = RoundTrip().round_trip([Item(np.arange(3), "x")], list[Item])
    assert back[0].note == "x"
    np.testing.assert_array_equal(back[0].ids, [0, 1, 2])


def test_a_dtype_that_is_not_the_annotated_one_is_refused():
    with pytest.raises(msgspec.ValidationError, match=r"int32.*float64.*\$\[0\]"):
        RoundTrip().round_trip([np.zeros(2)], list[npt.NDArray[np.int32]])
    with pytest.raises(msgspec.ValidationError, match="ndarray"):
        RoundTrip().round_trip([1, 2], npt.NDArray[np.int32])


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("\ud800", "value"),
        ({"a": ["b", "\udfff"]}, "value['a'][1]"),
        ({"\ud800": 1}, "value{key '\\ud800'}"),
        (2**64, "value"),
        ([0, -(2**63) - 1], "value[1]"),
        (Nested({"x": threading.Lock()}), "value.value['x']"),
        ({1.5: object()}, "value[float]"),
        ({object(): 1}, "value{key object}"),
        ((1, {2, 3}, {"f": print}), "value[2]['f']"),
        ([np.array([None])], "value[0]"),
        (np.zeros(2, "V4"), "value"),
        (np.ma.masked_array([1, 2], [True, False]), "value"),
        (np.datetime64("2026-01-01"), "value"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_what_cannot_travel_is_named_by_its_path(value, path):
    with pytest.raises(EncodeError) as caught:
        RoundTrip().round_trip(value, Any)
    assert caught.value.path == path
    assert str(caught.value).startswith(path)


def nested(depth: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    return deep


def test_depth_and_loops_are_named_without_recursion():
    _, reason = find_obstacle({"here": nested(500)}, "value", lambda leaf: None)
    assert reason == "it is nested 501 levels deep"
    # How deep msgspec goes depends on the Python.
    with pytest.raises(EncodeError, match="nested too deeply, or holds itself"):
        RoundTrip().round_trip({"here": nested(100_000)}, Any)
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(EncodeError, match="holds itself"):
        RoundTrip().round_trip(loop, Any)


def test_an_encoder_is_usable_after_a_failure():
    encoder = ValueEncoder()
    out = bytearray(b"before")
    with pytest.raises(EncodeError):
        encoder.encode_into([np.arange(3), object()], out)
    assert out == b"before"
    assert encoder.arrays == []
    encoder.encode_into(1, out)
    assert out == b"before\x01"


def test_the_path_search_reports_nothing_for_a_sound_value():
    assert find_obstacle([1, {"a": 2}], "value", lambda _: None) == ("value", None)


def _decode(payload: bytes, region: bytes) -> Any:
    decoder = ValueDecoder()
    return decoder.decode(payload, memoryview(region), decoder.compile(Any))


@few
@given(plain, st.data())
def test_a_mutated_payload_is_decoded_or_refused_with_a_typed_error(value, data):
    encoder, out = ValueEncoder(), bytearray()
    encoder.encode_into([value, np.arange(4), value], out)
    place = data.draw(st.integers(0, len(out) - 1))
    out[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(out)))
    for payload in (bytes(out), bytes(out[:cut])):
        with contextlib.suppress(ProtocolError, msgspec.ValidationError):
            _decode(payload, bytes(32))


@pytest.mark.parametrize(
    "extension",
    [
        b"",
        bytes(9),
        b"\0" * 8 + b"\x03\x01<i4" + b"\xff" * 8,  # more items than memory
        b"\0" * 8 + b"\x03\x02<i4" + bytes(8),  # one dimension missing
        b"\0" * 8 + b"\x02\x01|O" + b"\1" + bytes(7),  # objects
        b"\0" * 8 + b"\x03\x01f4," + b"\1" + bytes(7),  # not one dtype
        b"\xff" * 8 + b"\x03\x01<i4" + b"\1" + bytes(7),  # beyond the region
    ],
)
def test_a_false_description_of_an_array_is_refused_before_it_is_made(extension):
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, extension))
    with pytest.raises(ProtocolError):
        _decode(payload, bytes(32))


def test_unknown_extensions_and_deep_payloads_are_refused():
    with pytest.raises(ProtocolError, match="extension type 7"):
        _decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(7, b"x")), b"")
    with pytest.raises(ProtocolError, match="recursion"):
        _decode(b"\x91" * 100_000 + b"\xc0", b"")
