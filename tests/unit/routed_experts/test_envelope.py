"""The text form of routes: each part of it is checked, and what is wrong is named."""

import base64
import io
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.routed_experts import (
    RouteFormatError,
    decode_last_routes,
    decode_routes,
    encode_routes,
    routes_of_npy,
)

LETTERS = {"int8": "b", "int16": "h", "int32": "i"}


def naive_envelope(rows: list[list[list[int]]], dtype: str) -> str:
    flat = [expert for layers in rows for experts in layers for expert in experts]
    data = b"".join(struct.pack(f"<{LETTERS[dtype]}", expert) for expert in flat)
    shape = f"{len(rows)}x{len(rows[0])}x{len(rows[0][0])}"
    return f"nrlre1:{dtype}:{shape}:{base64.b64encode(data).decode()}"


@st.composite
def nested_routes(draw) -> tuple[list[list[list[int]]], str]:
    dtype = draw(st.sampled_from(sorted(LETTERS)))
    tokens, layers, top_k = (draw(st.integers(1, most)) for most in (6, 3, 4))
    expert = st.integers(-1, int(np.iinfo(dtype).max))
    values = draw(
        st.lists(expert, min_size=tokens * layers * top_k, max_size=tokens * layers * top_k)
    )
    return np.array(values).reshape(tokens, layers, top_k).tolist(), dtype


@settings(deadline=None, max_examples=60)
@given(nested_routes())
def test_an_envelope_is_what_a_naive_writer_makes_and_reads_back_exactly(case):
    rows, dtype = case
    routes = np.array(rows, dtype=dtype)

    text = encode_routes(routes)

    assert text == naive_envelope(rows, dtype)
    for form in (text, msgspec.json.encode(text), text.replace("/", "\\/").join('""').encode()):
        again = decode_routes(form)
        assert again.dtype == np.dtype(dtype)
        assert again.tolist() == rows


@settings(deadline=None, max_examples=60)
@given(nested_routes())
def test_nested_lists_read_like_the_envelope_of_the_same_routes(case):
    rows, dtype = case

    lists = decode_routes(msgspec.json.encode(rows))

    assert lists.tolist() == rows
    assert decode_routes(rows).tolist() == rows
    assert lists.dtype.name == ("int32" if max(np.ravel(rows)) > 32767 else "int16")
    assert decode_routes(rows, dtype).dtype.name == dtype


@settings(deadline=None, max_examples=60)
@given(nested_routes(), st.integers(0, 8))
def test_the_last_rows_alone_are_those_of_the_whole(case, first):
    rows, dtype = case

    for form in (naive_envelope(rows, dtype), rows):
        num_rows, last = decode_last_routes(form, first, dtype)
        assert num_rows == len(rows)
        assert last.tolist() == rows[first:]


@settings(deadline=None, max_examples=50)
@given(nested_routes(), st.data())
def test_a_damaged_envelope_never_reads_as_other_routes_of_another_size(case, data):
    rows, dtype = case
    text = naive_envelope(rows, dtype)
    cut = data.draw(st.integers(0, len(text) - 1))

    with pytest.raises(RouteFormatError):
        decode_routes(text[:cut])


@settings(deadline=None, max_examples=120)
@given(st.text(max_size=40) | st.binary(max_size=40))
def test_what_is_no_envelope_is_refused_with_one_error_type(value):
    with pytest.raises(RouteFormatError):
        decode_routes(value)


ENVELOPE = naive_envelope([[[0, 1]], [[2, 3]], [[-1, 5]]], "int8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with ''"),
        ("nrlre2" + ENVELOPE[6:], "begins with 'nrlre2:int8:3x1x2:"),
        ("hello", "an envelope of routes begins with 'nrlre1'"),
        ("nrlre1", "not nrlre1:<dtype>:<T>x<L>x<K>:<base64>"),
        ("nrlre1:int8:3x1x2", "not nrlre1:<dtype>:<T>x<L>x<K>:<base64>"),
        (ENVELOPE.replace("int8", "uint8"), "dtype is 'uint8'; it is one of int8, int16, int32"),
        (ENVELOPE.replace("int8", "int64"), "dtype is 'int64'"),
        (ENVELOPE.replace("int8", ""), "dtype is ''"),
        (ENVELOPE.replace("3x1x2", "3x2"), "shape is '3x2'"),
        (ENVELOPE.replace("3x1x2", "3x1x2x1"), "shape is '3x1x2x1'"),
        (ENVELOPE.replace("3x1x2", "-3x1x2"), "shape is '-3x1x2'"),
        (ENVELOPE.replace("3x1x2", "3x0x2"), "shape is '3x0x2'"),
        (ENVELOPE.replace("3x1x2", "03x1x2"), "shape is '03x1x2'"),
        (ENVELOPE.replace("3x1x2", "٣x1x2"), "shape is '٣x1x2'"),
        (ENVELOPE.replace("3x1x2", "4x1x2"), "6 elements of int8 where its shape 4x1x2 says 8"),
        (ENVELOPE.replace("3x1x2", "2x1x2"), "6 elements of int8 where its shape 2x1x2 says 4"),
        (
            ENVELOPE.replace("3x1x2", "9999999999x9999999999x9999999999"),
            "6 elements of int8 where its shape",
        ),
        (ENVELOPE.replace("int8", "int16"), "3 elements of int16 where its shape 3x1x2 says 6"),
        (ENVELOPE[:-1] + "!", "not base64"),
        (ENVELOPE[:-1] + "é", "not base64"),
        (naive_envelope([[[0, -2]]], "int8"), "-2 is no expert id"),
    ],
)
def test_the_part_of_an_envelope_that_is_wrong_is_named(text, message):
    with pytest.raises(RouteFormatError) as caught:
        decode_routes(text)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"[[0,1],[2,3]]", "rank 2"),
        (b"[0,1]", "rank 1"),
        (b"[[[[0]]]]", "rank 4"),
        (b"7", "rank 0"),
        (b"{}", "rank 0"),
        (b"[]", "lists without an element"),
        (b"[[[]]]", "lists without an element"),
        (b"[[[0,1]],[[2]]]", "token 1 has 1 layers of [1] experts where token 0 has 1 of 2"),
        (b"[[[0],[1]],[[2]]]", "token 1 has 1 layers of [1] experts where token 0 has 2 of 1"),
        (b"[[[0.5]]]", "something else than integers"),
        (b"[[[null]]]", "something else than integers"),
        (b"[[[2147483648]]]", "expert id 2147483648 does not fit int32"),
        (b"[[[9223372036854775808]]]", "does not fit 64 bits"),
        (b"[[[-2]]]", "-2 is no expert id"),
        (b"[[[", "no JSON"),
    ],
)
def test_lists_that_are_no_routes_say_what_they_are(value, message):
    with pytest.raises(RouteFormatError) as caught:
        decode_routes(value)

    assert message in str(caught.value)


def test_an_object_that_json_has_no_form_for_is_no_routes():
    with pytest.raises(RouteFormatError, match="neither an envelope nor lists"):
        decode_routes([[[object()]]])


def test_routes_without_a_token_travel():
    assert decode_routes("nrlre1:int8:0x4x2:").shape == (0, 4, 2)


def test_decoded_routes_are_a_view_of_the_bytes_and_not_a_copy():
    routes = decode_routes(ENVELOPE)

    assert not routes.flags.writeable
    assert not routes.flags.owndata


def test_an_id_too_large_for_the_asked_type_is_refused_with_the_type_that_holds_it():
    with pytest.raises(RouteFormatError) as caught:
        decode_routes([[[255, 256]]], "int8")

    assert "expert id 256 does not fit int8" in str(caught.value)
    assert "routed_experts_dtype='int16'" in str(caught.value)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32"])
def test_only_the_three_signed_types_have_an_envelope(dtype):
    with pytest.raises(RouteFormatError, match=f"type {dtype} have no envelope"):
        encode_routes(np.zeros((1, 1, 1), dtype=dtype))


@pytest.mark.parametrize("shape", [(2,), (2, 2), (1, 0, 2), (1, 2, 0), (1, 1, 1, 1)])
def test_only_three_dimensions_have_an_envelope(shape):
    with pytest.raises(RouteFormatError, match="have no envelope"):
        encode_routes(np.zeros(shape, dtype=np.int8))


def test_a_slice_with_gaps_is_written_in_order():
    routes = np.arange(24, dtype=np.int16).reshape(4, 3, 2)

    assert decode_routes(encode_routes(routes[::2, ::-1])).tolist() == routes[::2, ::-1].tolist()


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> str:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("int8", "int8"),
        ("int16", "int16"),
        ("int32", "int32"),
        (">i2", "int16"),
        ("uint8", "int16"),
        ("uint16", "int32"),
        ("int64", "int32"),
        ("uint32", "int32"),
    ],
)
def test_vllms_npy_text_becomes_signed_routes(given, taken):
    array = np.arange(12).reshape(3, 2, 2).astype(given)

    for routes in (
        routes_of_npy(npy(array)),
        routes_of_npy(npy(array, (2, 0))),
        routes_of_npy(npy(np.asfortranarray(array))),
        routes_of_npy(array),
    ):
        assert routes.dtype.name == taken
        assert routes.tolist() == array.tolist()


def test_unsigned_routes_with_the_highest_id_keep_it():
    array = np.full((2, 1, 1), 255, dtype=np.uint8)

    assert routes_of_npy(npy(array)).tolist() == [[[255]], [[255]]]
    with pytest.raises(RouteFormatError, match="expert id 255 does not fit int8"):
        routes_of_npy(npy(array), "int8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!!!", "not base64"),
        (base64.b64encode(b"nonsense").decode(), "no .npy file"),
        (npy(np.zeros((2, 2), dtype=np.int8)), "rank 2"),
        (npy(np.zeros((1, 1, 1), dtype=np.float32)), "type float32; integers are needed"),
        (npy(np.zeros((12, 1, 1), dtype=np.int8))[:-8], "elements of int8 where its shape"),
    ],
)
def test_what_is_no_npy_of_routes_is_refused(text, message):
    with pytest.raises(RouteFormatError) as caught:
        routes_of_npy(text)

    assert message in str(caught.value)


def test_an_npy_file_of_pickled_objects_is_never_opened():
    file = io.BytesIO()
    np.save(file, np.array([[[{}]]], dtype=object), allow_pickle=True)

    with pytest.raises(RouteFormatError, match="type object"):
        routes_of_npy(base64.b64encode(file.getvalue()).decode())
