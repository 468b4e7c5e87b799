"""Values as bytes: msgpack by annotation, with numpy arrays out of band. No pickle.

An encoded value is a *payload* (msgpack) and a *region* of raw array bytes. In the payload an array
is an extension of type 1 that holds its offset in the region, its dtype and its shape; decoded
arrays are read-only views of the region, without a copy.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gymrl.actors.contract import accept_custom
from gymrl.errors import EncodeError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Buffer = bytes | bytearray | memoryview

ARRAY_CODE = 1
ALIGNMENT = 16
_ARRAY_PREFIX = struct.Struct("<QBB")
_TRAVELLING_DTYPE = re.compile(r"[<>|=][biufcSUmM][0-9]+(\[[0-9A-Za-zμ]+\])?", re.ASCII)
_MAX_DEPTH = 10_000
_MAX_DIMENSIONS = 64

# What msgspec raises for a value that it cannot encode.
ENCODE_FAULTS = (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError)
# What msgspec and the hooks raise for bytes that are not what the type says.
DECODE_FAULTS = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
)


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment`."""
    return -(-offset // alignment) * alignment


class ValueEncoder:
    """Encodes one value at a time; arrays are gathered beside the payload.

    Attributes:
        arrays: The last value's arrays with their offsets in the region.
        region_size: Bytes that the last value's region takes.
    """

    def __init__(self) -> None:
        self.arrays: list[tuple[int, npt.NDArray[Any]]] = []
        self.region_size = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)

    def encode_into(self, value: object, out: bytearray, root: str = "value") -> None:
        """Append the payload of `value` to `out`.

        Args:
            value: Anything that :mod:`msgspec` encodes, and arrays anywhere inside.
            out: Is as long as before when this raises.
            root: What the path in an error begins with.

        Raises:
            EncodeError: The value cannot travel; the text leads to the part that cannot.
        """
        start = len(out)
        if self.arrays:
            self.arrays = []
        self.region_size = 0
        try:
            self._encoder.encode_into(value, out, -1)
        except ENCODE_FAULTS as error:
            del out[start:]
            self.arrays = []
            self.region_size = 0
            raise self._explain(value, root, error) from None

    def _hook(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic) and value.dtype.kind in "biufU":
            return value.item()
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is no plain data")

    def _array(self, array: npt.NDArray[Any]) -> msgspec.msgpack.Ext:
        if type(array) is not np.ndarray and not isinstance(array, np.memmap):
            raise TypeError(f"arrays of class {type(array).__name__} lose what they add")
        name = _name_cache.get(array.dtype) or _name_of(array.dtype)
        if not array.flags.c_contiguous:
            array = np.array(array, order="C")
        offset = aligned(self.region_size)
        self.arrays.append((offset, array))
        self.region_size = offset + array.nbytes
        shape = array.shape
        return msgspec.msgpack.Ext(
            ARRAY_CODE,
            struct.pack(
                f"<QBB{len(name)}s{len(shape)}Q", offset, len(name), len(shape), name, *shape
            ),
        )

    def _explain(self, value: object, root: str, error: Exception) -> EncodeError:
        path, reason = find_obstacle(value, root, self._leaf_fault)
        self.arrays = []
        self.region_size = 0
        if reason is None:
            path, reason = root, str(error)
        return EncodeError(f"{path} cannot travel between processes: {reason}", path=path)

    def _leaf_fault(self, value: object) -> str | None:
        try:
            self._encoder.encode(value)
        except UnicodeEncodeError as error:
            return f"the text has a lone surrogate at position {error.start}"
        except ENCODE_FAULTS as error:
            return f"{error} ({_short(value)})"
        return None


def _short(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, (int, float)):
        text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "huge"
        return f"{kind} {text}"
    return kind


def find_obstacle(
    value: object, root: str, leaf_fault: Callable[[object], str | None]
) -> tuple[str, str | None]:
    """The path to the first part of a value that does not encode, and why.

    Walks without recursion, so that depth itself can be what is found.
    """
    stack: list[tuple[object, str, int]] = [(value, root, 0)]
    deepest = (0, root)
    while stack:
        node, path, depth = stack.pop()
        if depth > _MAX_DEPTH:
            return _cut(path), "it is nested too deeply, or holds itself"
        deepest = max(deepest, (depth, path), key=lambda pair: pair[0])
        parts = _children(node, path)
        if parts is None:
            reason = leaf_fault(node)
            if reason is not None:
                return _cut(path), reason
            continue
        stack.extend((child, where, depth + 1) for child, where in reversed(parts))
    if deepest[0] > 100:
        return _cut(deepest[1]), f"it is nested {deepest[0]} levels deep"
    return root, None


def _cut(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:100]}...{path[-60:]}"


def _join(path: str, step: str) -> str:
    """A longer path, cut in the middle so that deep nesting stays linear."""
    return path + step if len(path) < 400 else f"{path[:120]}...{path[-80:]}{step}"


def _children(node: object, path: str) -> list[tuple[object, str]] | None:
    if isinstance(node, dict):
        parts: list[tuple[object, str]] = []
        for key, item in node.items():
            shown = repr(key) if isinstance(key, (str, int)) else type(key).__name__
            step = f"[{shown[:60]}]"
            if not isinstance(key, str) or not key.isascii():
                parts.append((key, _join(path, f"{{key {shown[:60]}}}")))
            parts.append((item, _join(path, step)))
        return parts
    if isinstance(node, (list, tuple, set, frozenset)):
        return [(item, _join(path, f"[{index}]")) for index, item in enumerate(node)]
    if isinstance(node, msgspec.Struct):
        return [(getattr(node, n), _join(path, f".{n}")) for n in node.__struct_fields__]
    fields = getattr(type(node), "__dataclass_fields__", None)
    if fields is not None:
        return [(getattr(node, n), _join(path, f".{n}")) for n in fields if hasattr(node, n)]
    return None


class ValueDecoder:
    """Decodes values; one a link, since the region of the value at hand is its state."""

    def __init__(self) -> None:
        self._region: memoryview | None = None

    def compile(self, type_: Any) -> Callable[[Buffer], Any]:
        """What :meth:`decode` needs to decode values of a type; keep it, it is costly to make."""
        return msgspec.msgpack.Decoder(
            type_, ext_hook=self._extension, dec_hook=accept_custom
        ).decode

    def decode(
        self, payload: Buffer, region: memoryview | None, compiled: Callable[[Buffer], Any]
    ) -> Any:
        """Decode a payload; its arrays are read-only views of `region` and keep it alive.

        Raises:
            msgspec.ValidationError: The value is not of the type; the text has its path.
            ProtocolError: The bytes are no encoded value.
        """
        self._region = region
        try:
            return compiled(payload)
        except msgspec.ValidationError:
            raise
        except DECODE_FAULTS as error:
            raise ProtocolError(f"the payload of a message does not decode: {error}") from error
        finally:
            self._region = None

    def _extension(self, code: int, data: memoryview) -> Any:
        if code != ARRAY_CODE:
            raise ValueError(f"extension type {code} is unknown")
        try:
            offset, name_length, dimensions = _ARRAY_PREFIX.unpack_from(data)
            name, *shape = struct.unpack_from(
                f"<{name_length}s{dimensions}Q", data, _ARRAY_PREFIX.size
            )
        except struct.error as error:
            raise ValueError(f"an array's description is torn: {error}") from None
        if len(data) != _ARRAY_PREFIX.size + name_length + 8 * dimensions:
            raise ValueError("an array's description has the wrong length")
        return self._view(offset, _dtype(name), shape)

    def _view(self, offset: int, dtype: np.dtype[Any], shape: list[int]) -> npt.NDArray[Any]:
        count = 1
        for length in shape:
            count *= length
        region = self._region
        available = 0 if region is None else len(region)
        if offset + count * dtype.itemsize > available or len(shape) > _MAX_DIMENSIONS:
            raise ValueError(
                f"an array of shape {tuple(shape)} and dtype {dtype} at {offset} leaves the "
                f"region of {available} bytes"
            )
        if count and not dtype.itemsize:
            # NumPy makes each such item a byte long, so a few bytes here could ask for terabytes.
            raise ValueError(f"an array of shape {tuple(shape)} has items of no size")
        if count == 0 or region is None:
            array = np.empty(shape, dtype)
            array.flags.writeable = False
            return array
        array = np.frombuffer(region, dtype, count, offset)
        return array if len(shape) == 1 else array.reshape(shape)


# Reading a type's name, and a name's type, costs more than moving a short array.
_CACHED_DTYPES = 1000
_dtype_cache: dict[bytes, np.dtype[Any]] = {}
_name_cache: dict[np.dtype[Any], bytes] = {}


def _name_of(dtype: np.dtype[Any]) -> bytes:
    name = dtype.str
    if not (dtype.itemsize and _TRAVELLING_DTYPE.fullmatch(name)) or dtype.names is not None:
        raise TypeError(f"arrays of dtype {dtype} do not travel")
    encoded = name.encode()
    if len(_name_cache) < _CACHED_DTYPES:
        _name_cache[dtype] = encoded
    return encoded


def _dtype(name: bytes) -> np.dtype[Any]:
    dtype = _dtype_cache.get(name)
    if dtype is None:
        text = name.decode("utf-8", "replace")
        if not _TRAVELLING_DTYPE.fullmatch(text):
            raise ValueError(f"an array has dtype {text[:40]!r}")
        dtype = np.dtype(text)
        if len(_dtype_cache) < _CACHED_DTYPES:
            _dtype_cache[name] = dtype
    return dtype


class RoundTrip:
    """Takes values through their encoding and back, as crossing a process would."""

    def __init__(self) -> None:
        self._encoder = ValueEncoder()
        self._decoder = ValueDecoder()
        self._compiled: dict[Any, Callable[[Buffer], Any]] = {}

    def round_trip(self, value: object, type_: Any, root: str = "value") -> Any:
        """What arrives when `value` is sent to where `type_` is expected.

        Raises:
            EncodeError: The value cannot travel.
            msgspec.ValidationError: It is not of the type.
        """
        out = bytearray()
        self._encoder.encode_into(value, out, root)
        region = bytearray(self._encoder.region_size)
        for offset, array in self._encoder.arrays:
            region[offset : offset + array.nbytes] = raw_bytes(array)
        self._encoder.arrays = []
        compiled = self._compiled.get(type_)
        if compiled is None:
            compiled = self._compiled[type_] = self._decoder.compile(type_)
        return self._decoder.decode(out, memoryview(bytes(region)), compiled)


def raw_bytes(array: npt.NDArray[Any]) -> memoryview:
    """The memory of a C-contiguous array, without a copy."""
    if array.size == 0:
        return memoryview(b"")
    flat = array if array.ndim == 1 else array.reshape(-1)
    return flat.view(np.uint8).data
