"""Token lists out of an answer's bytes before its JSON is decoded.

Nearly every byte of a long rollout's answer is a number in a token list. A JSON parser goes through
each of them only to learn where its list ends, and holds the interpreter meanwhile; searching bytes
finds the end at memory speed. So long lists are lifted out, a short text stands in for each, and the
parser sees the rest.

Keys and lists are found by their spelling alone, which is enough: in valid JSON a name between two
bare quotes, followed by a colon, is a key. What comes of bytes that are no valid JSON is decided by
whoever decodes them.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""The lists that an output item carries for training."""

TRAINING_FIELDS = (*TOKEN_FIELDS, "routed_experts")
"""All that an item carries for training; :attr:`Trajectory.result` does not repeat it."""

SHORT_LIST_BYTES = 64
"""Lists up to here stay: standing in for them would gain nothing."""

_NAMES = "|".join(TOKEN_FIELDS)
_KEY = re.compile(rf'"({_NAMES})"[ \t\r\n]*:[ \t\r\n]*\['.encode())


class LiftedAnswer(msgspec.Struct, frozen=True):
    """An answer without its long token lists.

    Attributes:
        skeleton: The JSON with stand-ins, each a string that occurs nowhere else.
        lists: The text of each list by its stand-in (quotes included).
    """

    skeleton: bytes
    lists: dict[bytes, bytes]

    def restored(self, text: bytes) -> bytes:
        """A part of the skeleton with the lists back in their places.

        Raises:
            msgspec.DecodeError: A list that is put back is no JSON.
        """
        first = next(iter(self.lists), b"")
        mark = first.partition(b":")[0]
        if not first or mark not in text:
            return text
        return re.sub(re.escape(mark) + rb':\d+"', self._checked_list, text)

    def _checked_list(self, match: re.Match[bytes]) -> bytes:
        found = self.lists[match.group()]
        msgspec.json.decode(found)
        return found


def lift_token_lists(body: bytes) -> LiftedAnswer | None:
    """`body` without its long token lists; None when it has none, or they need mending first.

    Args:
        body: The answer as UTF-8.
    """
    mark = secrets.token_hex(8)
    pieces: list[bytes] = []
    lists: dict[bytes, bytes] = {}
    position = 0
    for name, start, end in _lists(body):
        if name == b"generation_log_probs" and _has_bare_names(body, start, end):
            return None
        if end - start <= SHORT_LIST_BYTES:
            continue
        stand_in = f'"{mark}:{len(lists)}"'.encode()
        lists[stand_in] = body[start:end]
        pieces += (body[position:start], stand_in)
        position = end
    if not lists:
        return None
    return LiftedAnswer(b"".join((*pieces, body[position:])), lists)


def _has_bare_names(body: bytes, start: int, end: int) -> bool:
    """Whether there is a NaN or an Infinity, which no JSON parser takes."""
    return body.find(b"N", start, end) >= 0 or body.find(b"I", start, end) >= 0


def _lists(body: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The name and the span of every list under a token field, in order."""
    position = 0
    while (key := _KEY.search(body, position)) is not None:
        start = key.end() - 1
        position = body.find(b"]", start) + 1
        if not position:
            return
        yield key[1], start, position
