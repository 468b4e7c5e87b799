"""The JSON of a row, level by level, so that a page never holds all of a large one."""

from __future__ import annotations

from typing import Any

import msgspec

from gymrl.errors import RowValueError

ENTRIES = 100
"""Entries of an object or array that one answer has."""
STRING_CHARS = 20_000
"""Characters of a string that one answer has."""
_PREVIEW_CHARS = 80
_MAX_DEPTH = 200


class RawEntry(msgspec.Struct, frozen=True):
    """A member of an object or array.

    Attributes:
        key: Its name, or its position.
        type: As in :class:`RawNode`.
        length: Members, characters; 0 for numbers and the like.
        preview: The value where it is short, else its beginning.
    """

    key: str | int
    type: str
    length: int
    preview: str


class RawNode(msgspec.Struct, frozen=True, kw_only=True):
    """One value, or as much of it as an answer has.

    Attributes:
        type: object, array, string, number, boolean or null.
        length: All members or characters.
        offset: Of the first entry or character that is here.
        entries: Of an object or array.
        text: Of a string; else the value as JSON.
    """

    type: str
    length: int
    offset: int
    entries: list[RawEntry] = []
    text: str = ""


def raw_node(line: bytes, path: str, offset: int) -> RawNode:
    """One value of a line.

    Args:
        line: The whole JSON line.
        path: A JSON array of names and positions that lead to the value.
        offset: Which members or characters to begin with.

    Raises:
        RowValueError: There is nothing at that path.
    """
    try:
        steps = msgspec.json.decode(path.encode(), type=list[str | int])
    except msgspec.DecodeError as error:
        raise RowValueError(f"path {path!r} is no JSON array of names and positions") from error
    value = msgspec.json.decode(line)
    for step in steps[:_MAX_DEPTH]:
        if not _has(value, step):
            raise RowValueError(f"the line has nothing at {path}")
        value = value[step]
    kind, length = _kind(value), _length(value)
    offset = min(max(offset, 0), length)
    if isinstance(value, dict):
        members = list(value.items())[offset : offset + ENTRIES]
        entries = [_entry(key, member) for key, member in members]
        return RawNode(type=kind, length=length, offset=offset, entries=entries)
    if isinstance(value, list):
        members = list(enumerate(value[offset : offset + ENTRIES], start=offset))
        entries = [_entry(key, member) for key, member in members]
        return RawNode(type=kind, length=length, offset=offset, entries=entries)
    text = value[offset : offset + STRING_CHARS] if isinstance(value, str) else _json(value)
    return RawNode(type=kind, length=length, offset=offset, text=text)


def _has(value: Any, step: str | int) -> bool:
    if isinstance(value, dict):
        return step in value
    return isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value)


def _entry(key: str | int, value: Any) -> RawEntry:
    if isinstance(value, str):
        preview = value[:_PREVIEW_CHARS]
    elif isinstance(value, dict | list):
        preview = ""
    else:
        preview = _json(value)
    return RawEntry(key, _kind(value), _length(value), preview)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _length(value: Any) -> int:
    return len(value) if isinstance(value, dict | list | str) else 0


def _kind(value: Any) -> str:
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (dict, "object"),
        (list, "array"),
        (str, "string"),
        (bool, "boolean"),
        ((int, float), "number"),
    )
    return next((name for types, name in kinds if isinstance(value, types)), "null")
