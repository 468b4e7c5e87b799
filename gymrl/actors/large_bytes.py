"""Large ``bytes`` inside a value, which go beside its payload instead of through msgpack."""

from __future__ import annotations

import copy
import itertools
import os
import struct
from typing import Any

import msgspec

from gymrl.actors.contract import fields_with_bytes

# From this size on, bytes are not copied through msgpack.
LARGE_BYTES = 64 << 10

_bin32 = struct.Struct(">BI")


class LargeBytes:
    """Takes large ``bytes`` out of a value before it is encoded, and puts them back into the flow.

    In their places go short random marks; where a mark comes out in the payload, the bytes
    themselves follow instead, so the receiver sees plain msgpack.
    """

    def __init__(self) -> None:
        self._secret = os.urandom(16)
        self._numbers = itertools.count()
        self._fields: dict[type, tuple[str, ...]] = {}

    def lift(self, value: Any, taken: dict[bytes, bytes]) -> Any:
        """`value` with marks for its large bytes; `value` itself when it has none."""
        if type(value) is bytes:
            if len(value) < LARGE_BYTES:
                return value
            mark = self._secret + next(self._numbers).to_bytes(8, "big")
            taken[mark] = value
            return mark
        if isinstance(value, msgspec.Struct):
            return self._lift_fields(value, taken)
        if type(value) in (list, tuple):
            # The first item tells what a sequence holds: sequences of numbers are not walked.
            if not value or type(value[0]) in (int, float, bool, str):
                return value
            items = [self.lift(item, taken) for item in value]
            changed = any(new is not old for new, old in zip(items, value, strict=True))
            return type(value)(items) if changed else value
        if type(value) is dict:
            lifted = {key: self.lift(item, taken) for key, item in value.items()}
            changed = any(lifted[key] is not item for key, item in value.items())
            return lifted if changed else value
        return value

    def _lift_fields(self, value: msgspec.Struct, taken: dict[bytes, bytes]) -> msgspec.Struct:
        names = self._fields.get(type(value))
        if names is None:
            names = self._fields[type(value)] = fields_with_bytes(type(value))
        changed: msgspec.Struct | None = None
        for name in names:
            old = getattr(value, name)
            new = self.lift(old, taken)
            if new is not old:
                changed = changed or copy.copy(value)
                msgspec.structs.force_setattr(changed, name, new)
        return changed or value


def splice(payload: bytes, taken: dict[bytes, bytes]) -> list[bytes]:
    """The payload in pieces, with the lifted bytes in the places of their marks."""
    places = sorted((payload.index(mark), mark) for mark in taken)
    pieces: list[bytes] = []
    start = 0
    for place, mark in places:
        pieces.append(payload[start : place - 2])  # without the mark's own two-byte header
        blob = taken[mark]
        pieces.append(_bin32.pack(0xC6, len(blob)))
        pieces.append(blob)
        start = place + len(mark)
    pieces.append(payload[start:])
    return pieces
