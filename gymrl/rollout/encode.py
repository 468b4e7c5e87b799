"""A row's body as JSON, with everything refused that JSON would change on the way."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gymrl.errors import RowValueError

MAX_NESTING = 200
"""Deeper values are refused: the recursive parsers of a row's readers give up soon after."""

_encoder = msgspec.json.Encoder()


def encode_body(body: dict[str, Any], index: int, *, checked: bool = False) -> bytes:
    """The body of a ``/run`` call.

    Args:
        body: Plain data.
        index: The row's, for errors.
        checked: The same data was encoded before, so that searching its depths again is needless.

    Raises:
        RowValueError: Names the row and the path of a value that JSON has no form for: NaN and
            infinity (which would become null), integers beyond 64 bits, lone surrogates, keys
            that are no strings, foreign types, and nesting beyond :data:`MAX_NESTING`.
    """
    if not checked:
        problem = find_unencodable(body)
        if problem is not None:
            path, reason = problem
            raise RowValueError(f"row {index}: {path}: {reason}", row=index)
    return _encoder.encode(body)


# A path is a linked list from the value up to the root, so that walking costs no strings.
_Path = tuple[Any, "str | int"] | None


def find_unencodable(value: Any) -> tuple[str, str] | None:
    """The path and the reason of the first value that can't travel as it is, or None."""
    stack: list[tuple[Any, _Path, int]] = [(value, None, 0)]
    while stack:
        current, path, depth = stack.pop()
        reason = _scalar_problem(current)
        if reason is None and isinstance(current, dict | list | tuple):
            if depth >= MAX_NESTING:
                return _format(path), f"nested more than {MAX_NESTING} deep"
            if isinstance(current, dict):
                bad_key = next((k for k in current if _key_problem(k)), None)
                if bad_key is not None or None in current:
                    return _format(path), f"key {bad_key!r} is no text that JSON can hold"
                children = list(current.items())
            else:
                children = list(enumerate(current))
            stack.extend((item, (path, key), depth + 1) for key, item in reversed(children))
        if reason is not None:
            return _format(path), reason
    return None


def _key_problem(key: Any) -> bool:
    return not isinstance(key, str) or _scalar_problem(key) is not None


def _scalar_problem(value: Any) -> str | None:
    kind = type(value)
    if kind is str:
        return None if value.isascii() or _is_unicode(value) else "the text has a lone surrogate"
    if kind is float:
        return None if math.isfinite(value) else f"{value} has no form in JSON"
    if kind is int:
        if -(2**63) <= value < 2**64:
            return None
        return "the integer is beyond 64 bits; send it as text"
    if value is None or kind is bool or isinstance(value, dict | list | tuple):
        return None
    return f"a {kind.__module__}.{kind.__qualname__} is no JSON value; convert it first"


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _format(path: _Path) -> str:
    keys: list[str | int] = []
    while path is not None:
        path, key = path
        keys.append(key)
    text = ""
    for key in reversed(keys):
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            shown = key if key.isidentifier() else repr(key)
            text += f".{shown}" if text else shown
    return text or "the row"
