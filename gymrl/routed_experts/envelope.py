"""Routes as one JSON string, so that hops that don't care pay a copy of it and no parsing.

::

    nrlre1:<int8|int16|int32>:<T>x<L>x<K>:<base64 of the C-contiguous little-endian bytes>

Servers may send nested lists instead, and vLLM sends base64 of a ``.npy`` file.
"""

from __future__ import annotations

import binascii
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gymrl.routed_experts.experts import (
    ROUTES_DTYPES,
    UNKNOWN_EXPERTS_DTYPE,
    RouteFormatError,
    fit_routes,
    routes_dtype,
    signed_routes,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from gymrl.types import RoutesArray

MAGIC = "nrlre1"
"""Begins every envelope; its last character is the version."""

_SHAPE = re.compile(r"(0|[1-9][0-9]{0,9})x([1-9][0-9]{0,9})x([1-9][0-9]{0,9})", re.ASCII)
_HEAD_CHARS = 80
"""The envelope's head is shorter than this, whatever its numbers."""

_nested = msgspec.json.Decoder(list[list[list[int]]])


def encode_routes(routes: npt.NDArray[Any]) -> str:
    """The envelope of routes.

    Args:
        routes: ``[T, L, K]``, of one of :data:`~gymrl.routed_experts.experts.ROUTES_DTYPES`.

    Raises:
        RouteFormatError: They have another rank or another type, or L or K is 0.
    """
    name = routes.dtype.name
    if routes.ndim != 3 or 0 in routes.shape[1:]:
        raise RouteFormatError(
            f"routes of shape {list(routes.shape)} have no envelope; tokens, layers and experts a "
            "token are needed"
        )
    if name not in ROUTES_DTYPES:
        raise RouteFormatError(
            f"routes of type {routes.dtype} have no envelope; it takes {', '.join(ROUTES_DTYPES)}"
        )
    little = np.ascontiguousarray(routes, dtype=routes.dtype.newbyteorder("<"))
    text = binascii.b2a_base64(little.reshape(-1).view(np.uint8).data, newline=False)
    shape = "x".join(str(size) for size in routes.shape)
    return f"{MAGIC}:{name}:{shape}:{text.decode('ascii')}"


def decode_routes(value: str | bytes | Sequence[Any], dtype: str | None = None) -> RoutesArray:
    """Routes out of what an output item carries.

    Args:
        value: An envelope; nested lists; or either of them as the bytes of a JSON value.
        dtype: Make them of this type; None keeps the envelope's, and takes the narrowest type
            from ``int16`` on for lists.

    Returns:
        ``[T, L, K]``, read-only where it is a view of the decoded bytes.

    Raises:
        RouteFormatError: Some part of it is wrong: which one, and what it says.
    """
    return decode_last_routes(value, 0, dtype)[1]


def decode_last_routes(
    value: str | bytes | Sequence[Any], first: int, dtype: str | None = None
) -> tuple[int, RoutesArray]:
    """As :func:`decode_routes`, but the rows from `first` on alone.

    Each call of a rollout repeats the routes of all that was before; of an envelope, only the part
    that is asked for is decoded and checked.

    Args:
        value: As there.
        first: The first row that is wanted.
        dtype: As there.

    Returns:
        How many rows there are in all, and those from `first` on (none where there are fewer).

    Raises:
        RouteFormatError: As there.
    """
    if isinstance(value, str):
        num_rows, routes = _of_text(value.encode("utf-8", "replace"), first)
    elif isinstance(value, bytes) and value.startswith(b'"'):
        if b"\\" in value or not value.endswith(b'"'):
            return decode_last_routes(_plain_text(value), first, dtype)
        num_rows, routes = _of_text(memoryview(value)[1:-1], first)
    else:
        whole = _of_lists(value if isinstance(value, bytes) else _as_json(value))
        num_rows, routes = len(whole), whole[first:]
    return num_rows, routes if dtype is None else fit_routes(routes, dtype)


def _plain_text(value: bytes) -> str:
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.DecodeError as error:
        raise RouteFormatError(f"routes are no JSON: {error}") from None


def _as_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, OverflowError) as error:
        raise RouteFormatError(f"routes are neither an envelope nor lists: {error}") from None


def _of_text(text: bytes | memoryview, first: int) -> tuple[int, RoutesArray]:
    view = memoryview(text)
    head = bytes(view[:_HEAD_CHARS]).decode("utf-8", "replace")
    parts = head.split(":", 3)
    if parts[0] != MAGIC:
        raise RouteFormatError(
            f"the text begins with {head[:24]!r}; an envelope of routes begins with {MAGIC!r}"
        )
    if len(parts) != 4:
        raise RouteFormatError(
            f"the envelope's head {head!r} is not {MAGIC}:<dtype>:<T>x<L>x<K>:<base64>"
        )
    _, name, shape_text, _ = parts
    if name not in ROUTES_DTYPES:
        raise RouteFormatError(
            f"the envelope's dtype is {name!r}; it is one of {', '.join(ROUTES_DTYPES)} (signed, "
            "so that -1 can say that a route is missing)"
        )
    matched = _SHAPE.fullmatch(shape_text)
    if matched is None:
        raise RouteFormatError(
            f"the envelope's shape is {shape_text!r}; it is <tokens>x<layers>x<experts a token>, "
            "the last two at least 1"
        )
    num_rows, num_layers, top_k = (int(size) for size in matched.groups())
    start = len(MAGIC) + len(name) + len(shape_text) + 3
    shape = (num_rows, num_layers, top_k)
    return num_rows, _of_base64(view[start:], name, shape, min(first, num_rows))


def _of_base64(text: memoryview, name: str, shape: tuple[int, int, int], first: int) -> RoutesArray:
    dtype = ROUTES_DTYPES[name].newbyteorder("<")
    row_bytes = shape[1] * shape[2] * dtype.itemsize
    # Before decoding: a head that promises more than there is costs nothing.
    num_bytes = _decoded_size(text)
    if num_bytes != shape[0] * row_bytes:
        raise _wrong_count(num_bytes, name, shape)
    # Four characters are three bytes, so decoding may begin at every third.
    skipped = first * row_bytes // 3
    try:
        data = binascii.a2b_base64(text[4 * skipped :], strict_mode=True)
    except ValueError as error:
        raise RouteFormatError(f"the envelope's data is not base64: {error}") from None
    rows = np.frombuffer(data, dtype=np.uint8)[first * row_bytes - 3 * skipped :]
    if rows.size != (shape[0] - first) * row_bytes:
        raise _wrong_count(3 * skipped + len(data), name, shape)
    return signed_routes(rows.view(dtype).reshape(-1, *shape[1:]))


def _decoded_size(text: memoryview) -> int:
    padding = bytes(text[-2:]).count(b"=")
    return len(text) // 4 * 3 - padding if len(text) % 4 == 0 else -1


def _wrong_count(num_bytes: int, name: str, shape: tuple[int, int, int]) -> RouteFormatError:
    if num_bytes < 0:
        return RouteFormatError("the envelope's data is not base64: its length is no multiple of 4")
    count, size = shape[0] * shape[1] * shape[2], ROUTES_DTYPES[name].itemsize
    dims = "x".join(str(length) for length in shape)
    return RouteFormatError(
        f"the envelope holds {num_bytes / size:g} elements of {name} where its shape {dims} says "
        f"{count}"
    )


def _of_lists(text: bytes) -> RoutesArray:
    try:
        rows = _nested.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise _no_lists(text) from None
    if not rows or not rows[0] or not rows[0][0]:
        raise RouteFormatError(
            "routes are lists without an element; leave the field out where nothing was captured"
        )
    shape = (len(rows), len(rows[0]), len(rows[0][0]))
    for token, layers in enumerate(rows):
        if len(layers) != shape[1] or any(len(experts) != shape[2] for experts in layers):
            sizes = sorted({len(experts) for experts in layers})
            raise RouteFormatError(
                f"token {token} has {len(layers)} layers of {sizes} experts where token 0 has "
                f"{shape[1]} of {shape[2]}"
            )
    try:
        wide = np.array(rows, dtype=np.int64)
    except OverflowError:
        raise RouteFormatError("an expert id does not fit 64 bits") from None
    largest = int(wide.max())
    name = UNKNOWN_EXPERTS_DTYPE
    if largest > np.iinfo(ROUTES_DTYPES[name]).max:
        name = routes_dtype(largest + 1)
    return fit_routes(wide, name)


def _no_lists(text: bytes) -> RouteFormatError:
    shown = text[:60].decode("utf-8", "replace")
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        return RouteFormatError(f"routes are no JSON: {shown!r} ({error})")
    rank = 0
    while isinstance(value, list):
        rank += 1
        value = value[0] if value else None
    if rank != 3:
        return RouteFormatError(
            f"routes have rank {rank} ({shown!r}); rank 3 is needed: tokens, layers, experts a "
            "token"
        )
    return RouteFormatError(f"routes hold something else than integers: {shown!r}")


def routes_of_npy(value: str | bytes | npt.NDArray[Any], dtype: str | None = None) -> RoutesArray:
    """Routes as vLLM gives them: an array, or base64 of a ``.npy`` file.

    Args:
        value: The array, or the text.
        dtype: Make them of this type; None: see :func:`~gymrl.routed_experts.experts.signed_routes`.

    Raises:
        RouteFormatError: It is none of the two, or no routes.
    """
    if isinstance(value, np.ndarray):
        routes = signed_routes(value)
        return routes if dtype is None else fit_routes(routes, dtype)
    try:
        data = binascii.a2b_base64(value, strict_mode=True)
    except ValueError as error:
        raise RouteFormatError(f"routed_experts is not base64: {error}") from None
    return routes_of_npy(_npy_array(data), dtype)


def _npy_array(data: bytes) -> npt.NDArray[Any]:
    file = io.BytesIO(data)
    npy: Any = np.lib.format  # its functions have no annotations
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        shape, is_fortran, dtype = read[npy.read_magic(file)](file)
    except (ValueError, EOFError, KeyError) as error:
        raise RouteFormatError(f"routed_experts holds no .npy file: {error}") from None
    if dtype.kind not in "iu":
        raise RouteFormatError(f"routed_experts is of type {dtype}; integers are needed")
    start, count = file.tell(), int(np.prod(shape, dtype=object))
    held = (len(data) - start) / dtype.itemsize
    if held != count:
        raise RouteFormatError(
            f"routed_experts holds {held:g} elements of {dtype} where its shape {shape} says "
            f"{count}"
        )
    array = np.frombuffer(data, dtype=dtype, offset=start)
    return array.reshape(shape, order="F" if is_fortran else "C")
