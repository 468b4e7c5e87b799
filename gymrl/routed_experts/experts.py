"""Expert ids as arrays: how many experts there are, and the narrowest type that holds their ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from gymrl.config import RoutesDtype
    from gymrl.types import RoutesArray

MISSING = -1
"""Stands in the place of an expert's id where no capture covered the token."""

ROUTES_DTYPES: dict[str, np.dtype[np.signedinteger[Any]]] = {
    name: np.dtype(name) for name in ("int8", "int16", "int32")
}
"""The types that routes travel in, narrowest first. They are signed, so that they hold `MISSING`."""

UNKNOWN_EXPERTS_DTYPE: RoutesDtype = "int16"
"""The type where nobody says how many experts there are."""

_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


class RouteFormatError(ValueError):
    """A value is not the routes that it should be. The caller knows whose they are, and says so."""


def count_experts(config: Any) -> int | None:
    """How many experts a layer of a model has, from its Hugging Face configuration.

    Read from ``num_experts``, ``n_routed_experts`` or ``num_local_experts``, else from those of
    ``text_config``.

    Args:
        config: A configuration object, or its JSON as a mapping.

    Returns:
        None for a dense model, or one that names them otherwise.
    """
    for level in (config, _member(config, "text_config")):
        for name in _COUNTS:
            count = _member(level, name)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    return None


def _member(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def routes_dtype(num_experts: int | None) -> RoutesDtype:
    """The narrowest type for ids below `num_experts` and for `MISSING`.

    ``int8`` up to 128 experts, ``int16`` up to 32768, else ``int32``; ``int16`` for an unknown
    number.

    Args:
        num_experts: As :func:`count_experts` gives it.
    """
    if num_experts is None:
        return UNKNOWN_EXPERTS_DTYPE
    if num_experts - 1 <= np.iinfo(np.int8).max:
        return "int8"
    return "int16" if num_experts - 1 <= np.iinfo(np.int16).max else "int32"


def signed_routes(array: npt.NDArray[Any]) -> RoutesArray:
    """Routes in one of `ROUTES_DTYPES`, whatever integers they came as.

    A signed type of theirs stays as it is, without a copy. Others become the narrowest type that
    holds the whole range of what they came in (``uint8``: ``int16``), those of 32 bits and more
    ``int32``.

    Args:
        array: ``[T, L, K]``.

    Raises:
        RouteFormatError: It has another rank, holds no integers, or an id that is none.
    """
    if array.ndim != 3:
        raise RouteFormatError(
            f"routes have rank {array.ndim} (shape {list(array.shape)}); rank 3 is needed: "
            "tokens, layers, experts a token"
        )
    if array.dtype.kind not in "iu":
        raise RouteFormatError(f"routes are of type {array.dtype}; integers are needed")
    native = array.dtype.newbyteorder("=")
    if native.name in ROUTES_DTYPES:
        routes: RoutesArray = array.astype(native, copy=False)
        _check_smallest(routes)
        return routes
    name = {"uint8": "int16", "uint16": "int32"}.get(native.name, "int32")
    return fit_routes(array, name)


def fit_routes(array: npt.NDArray[Any], name: str) -> RoutesArray:
    """Routes in the type called `name`; the same array where they are of it already.

    Raises:
        RouteFormatError: An id does not fit the type, or is below `MISSING`.
    """
    dtype = ROUTES_DTYPES[name]
    if array.size:
        largest = int(array.max())
        if largest > np.iinfo(dtype).max:
            raise RouteFormatError(
                f"expert id {largest} does not fit {name}, which ends at {np.iinfo(dtype).max}; "
                f"set routed_experts_dtype={routes_dtype(largest + 1)!r}"
            )
    _check_smallest(array)
    return array.astype(dtype, copy=False)


def _check_smallest(array: npt.NDArray[Any]) -> None:
    if array.size and array.dtype.kind == "i":
        smallest = int(array.min())
        if smallest < MISSING:
            raise RouteFormatError(
                f"{smallest} is no expert id: they count from 0, and {MISSING} means none is known"
            )


def missing_routes(num_tokens: int, num_layers: int, top_k: int, name: str) -> RoutesArray:
    """``[num_tokens, num_layers, top_k]`` of `MISSING` in the type called `name`."""
    return np.full((num_tokens, num_layers, top_k), MISSING, dtype=ROUTES_DTYPES[name])
