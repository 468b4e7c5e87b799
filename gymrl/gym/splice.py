"""Take the training fields out of an answer's bytes and leave every other byte as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gymrl.gym.lifting import TRAINING_FIELDS

if TYPE_CHECKING:
    import msgspec

    from gymrl.gym.schema import Response

_WHITE = b" \t\r\n"


def without_token_fields(body: bytes, response: Response) -> bytes:
    """`body` less the training fields of the items of ``response.output``.

    Args:
        body: The bytes that `response` was decoded from.
        response: Its token fields are slices of `body`; that is how their places are known. A
            field with bytes of its own is not in `body` and left alone.
    """
    base = _address(body)
    members = sorted(
        _member(body, name, start, length)
        for item in response.output or []
        for name in TRAINING_FIELDS
        if (length := len(memoryview(raw := getattr(item, name))))
        and 0 <= (start := _address(raw) - base) <= len(body) - length
    )
    kept, position = [], 0
    for start, end in _runs(body, members):
        kept.append(body[position:start])
        position = end
    kept.append(body[position:])
    return b"".join(kept)


def _address(buffer: bytes | msgspec.Raw) -> int:
    view = np.frombuffer(buffer, dtype=np.uint8)
    address: int = view.__array_interface__["data"][0]
    return address


def _member(body: bytes, name: str, start: int, length: int) -> tuple[int, int]:
    """The span of ``"name": value``, from its value's."""
    colon = _skip_back(body, start)
    quote = _skip_back(body, colon - 1)
    # A key spelled with escapes is longer than the name; its opening quote is searched.
    key = quote - len(name) - 2
    if body[key:quote] != f'"{name}"'.encode():
        key = body.rindex(b'"', 0, quote - 1)
    return key, start + length


def _runs(body: bytes, members: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans to cut: members that follow each other together, with one comma beside them."""
    runs: list[tuple[int, int]] = []
    for key, end in members:
        after = _skip(body, end)
        if body[after : after + 1] == b",":
            after = _skip(body, after + 1)
        if runs and runs[-1][1] == key:
            runs[-1] = (runs[-1][0], after)
        else:
            runs.append((key, after))
    return [_with_comma(body, start, end) for start, end in runs]


def _with_comma(body: bytes, start: int, end: int) -> tuple[int, int]:
    if body[end : end + 1] == b"}":
        before = _skip_back(body, start)
        if body[before - 1 : before] == b",":
            return before - 1, end
    return start, end


def _skip(body: bytes, position: int) -> int:
    while body[position : position + 1] in (b" ", b"\t", b"\r", b"\n"):
        position += 1
    return position


def _skip_back(body: bytes, position: int) -> int:
    while position and body[position - 1] in _WHITE:
        position -= 1
    return position
