"""Texts of conversations to token ids, turn by turn, so that a turn is tokenised once.

Tokenising is what costs when a conversation is rendered again for its next turn, and nearly all of
it was tokenised before. Tokenizers cut a text at their special tokens before anything else, and
tokenise the pieces by themselves. So a piece up to an end-of-turn token has the same ids wherever it
stands, and they can be kept.

Not every tokenizer is so: one may mark the beginning of a text, or strip spaces around a token.
What is known to break the rule is looked for when a :class:`TurnEncoder` is built, and the rule is
tried on texts; where it doesn't hold, every text is tokenised as a whole.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

MAX_BYTES = 64 << 20
"""Memory for turns that are kept, some eight million tokens."""

ENTRY_BYTES = 256
"""What a kept turn costs beside its text and its ids, about."""

_BEGINNINGS = (
    "word",
    " word",
    "\nword",
    "  two",
    "\n\n",
    "\t\u00e9",
    "\u0301x",
    "1",
    "</s>",
    "\u2581x",
)
_ENDINGS = ("word", "word ", "word\n", "\u0301", "\u2581", "\n")


class TurnEncoder:
    """Token ids of texts, the ids of whole turns kept.

    Any number of threads may use it.

    Args:
        backend: Of the ``tokenizers`` library; without truncation and padding.
        end_ids: Tokens that end a turn.
        max_bytes: Of kept turns; what was not used for the longest time goes first.
    """

    def __init__(
        self, backend: Any, end_ids: Collection[int], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0
        borders = sorted(_borders(backend, end_ids), key=len, reverse=True)
        self._border = re.compile("|".join(map(re.escape, borders))) if borders else None
        if self._border is not None and not self._holds(borders):
            self._border = None

    @property
    def keeps_turns(self) -> bool:
        """Whether this tokenizer's turns can be tokenised one by one."""
        return self._border is not None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, exactly as the tokenizer gives them for the whole."""
        if self._border is None:
            return self._ids(text)
        ids: list[int] = []
        start = 0
        for found in self._border.finditer(text):
            ids.extend(self._turn(text[start : found.end()]))
            start = found.end()
        if start < len(text):
            # What opens the next turn is the same in every prompt.
            ids.extend(self._turn(text[start:]))
        return ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _turn(self, text: str) -> array[int]:
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
                return kept
        ids = array("i", self._ids(text))
        with self._lock:
            if text not in self._kept:
                self._kept[text] = ids
                self.nbytes += _size(text, ids)
            while self.nbytes > self._max_bytes:
                oldest, gone = self._kept.popitem(last=False)
                self.nbytes -= _size(oldest, gone)
        return ids

    def _holds(self, borders: list[str]) -> bool:
        """Whether the rule holds on texts that are made to break it."""
        return all(
            self._ids(end + border + begin) == self._ids(end + border) + self._ids(begin)
            for border in borders
            for end in _ENDINGS
            for begin in (*_BEGINNINGS, *borders)
        )


def _size(text: str, ids: array[int]) -> int:
    return ENTRY_BYTES + len(text.encode("utf-8", "surrogatepass")) + ids.itemsize * len(ids)


def _borders(backend: Any, end_ids: Collection[int]) -> list[str]:
    """The texts of end-of-turn tokens that cut any text they stand in."""
    added = backend.get_added_tokens_decoder()
    contents = [token.content for token in added.values()]
    return [
        added[token_id].content
        for token_id in end_ids
        if token_id in added and _cuts(added[token_id], contents, backend.normalizer is not None)
    ]


def _cuts(token: Any, contents: list[str], is_normalized: bool) -> bool:
    if not token.special or token.lstrip or token.rstrip or token.single_word:
        return False
    if token.normalized and is_normalized:
        # It is looked for in what the normalizer makes of the text.
        return False
    text: str = token.content
    if not text or text != text.strip():
        return False
    return not any(_may_hide(text, other) for other in contents if other != text)


def _may_hide(text: str, other: str) -> bool:
    """Whether finding `other` in a text may keep a tokenizer from finding `text` there."""
    return (
        text in other
        or other in text
        or any(other.endswith(text[:size]) for size in range(1, min(len(text), len(other)) + 1))
    )
