"""An answer taken apart while it is sampled: what may be shown already, as reasoning or as text.

A piece is sent as soon as it can't become anything else: not inside a character, not where a stop
text, a tag or a call may begin. From the first tool call on nothing is sent until the answer is
whole, and what a parser of vLLM's reads is not sent in pieces at all. All pieces together are what
the whole answer is parsed into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gymrl.generation.parsing import CALL_OPEN, PYTHON_TAG, THINK_CLOSE, THINK_OPEN

if TYPE_CHECKING:
    from gymrl.generation.parsing import ParsedText


_LONGEST_WAIT = 16
"""Tokens. A character has four bytes at most, so what does not end by then is none; a model may write
nothing else for as long as it likes, and all of it would be decoded again with each token."""


class Decoder(Protocol):
    """Token ids to text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens."""
        ...


class Piece(NamedTuple):
    """What came to be known of an answer."""

    reasoning: str = ""
    content: str = ""


class TextStream:
    """Turns tokens into pieces of text as they come.

    A piece is held back while it ends inside a character, and while a stop text may begin in it.

    Args:
        decoder: A chat format, say.
        stop: Stop texts of the call.
    """

    def __init__(self, decoder: Decoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held_back = max((len(text) - 1 for text in stop), default=0)
        self._ids: list[int] = []
        self._start = 0
        self._read = 0
        self._text = ""
        self._sent = 0

    def push(self, token_id: int) -> str:
        """The text that may be sent after one more token."""
        self._ids.append(token_id)
        before = self._decoder.decode(self._ids[self._start : self._read])
        now = self._decoder.decode(self._ids[self._start :])
        end = len(self._ids)
        if len(now) <= len(before) or now.endswith("\ufffd"):
            if (end - self._read) % _LONGEST_WAIT:
                return ""
            end = self._settled(now)
            if end == self._read:
                return ""
            now = self._decoder.decode(self._ids[self._start : end])
        self._text += now[len(before) :]
        self._start, self._read = self._read, end
        found = [self._text.find(text, self._sent) for text in self._stop]
        ends = [place for place in found if place >= 0] or [len(self._text) - self._held_back]
        until = max(self._sent, min(ends))
        piece, self._sent = self._text[self._sent : until], until
        return piece

    def _settled(self, now: str) -> int:
        """Up to which token nothing that follows can change the text; all of them read as `now`."""
        for end in range(len(self._ids) - 4, len(self._ids) - 8, -1):
            rest = self._decoder.decode(self._ids[end:])
            if self._decoder.decode(self._ids[self._start : end]) + rest == now:
                return end
        return self._read

    def finish(self, text: str) -> str:
        """What of the final text was not sent yet."""
        return text[self._sent :]


class AnswerStream:
    """Takes an answer apart as its tokens come.

    Args:
        text: Makes text of tokens.
        tool_parser: Of the calls that may come; ``none`` where none may.
        reasoning_parser: Of the reasoning.
        is_open: The prompt left the reasoning open.
    """

    def __init__(
        self, text: TextStream, tool_parser: str, reasoning_parser: str, *, is_open: bool = False
    ) -> None:
        self._text = text
        self._tool_parser = tool_parser
        self._pending = ""
        self._reasoning = ""
        self._content = ""
        self._is_open = is_open
        step = {"none": self._begin_content, "think": self._begin}
        self._step = step.get(reasoning_parser, self._hold)

    def push(self, token_id: int) -> Piece:
        """What may be sent after one more token."""
        self._pending += self._text.push(token_id)
        had = len(self._reasoning), len(self._content)
        step = None
        while step != self._step:
            step = self._step
            step()
        return Piece(self._reasoning[had[0] :], self._content[had[1] :])

    def finish(self, parsed: ParsedText) -> Piece:
        """What of the whole answer was not sent yet."""
        reasoning = (parsed.reasoning or "")[len(self._reasoning) :]
        return Piece(reasoning, parsed.content[len(self._content) :])

    def _begin(self) -> None:
        body = self._pending.lstrip()
        if body.startswith(THINK_OPEN):
            self._pending = body[len(THINK_OPEN) :]
            self._step = self._in_reasoning
        elif not THINK_OPEN.startswith(body):
            if self._is_open:
                self._pending = body
            self._step = self._in_reasoning if self._is_open else self._begin_content

    def _in_reasoning(self) -> None:
        if not self._reasoning:
            self._pending = self._pending.lstrip("\n")
        thought, closed, rest = self._pending.partition(THINK_CLOSE)
        if closed:
            self._reasoning += thought.rstrip("\n")
            self._pending = rest
            self._step = self._after_reasoning
            return
        # Line breaks at the end are no part of the reasoning.
        shown = _before(thought, THINK_CLOSE).rstrip("\n")
        self._reasoning += shown
        self._pending = self._pending[len(shown) :]

    def _after_reasoning(self) -> None:
        self._pending = self._pending.lstrip("\n")
        if self._pending:
            self._step = self._begin_content

    def _begin_content(self) -> None:
        steps = {"none": self._show, "hermes": self._until_call, "llama_json": self._unless_json}
        self._step = steps.get(self._tool_parser, self._hold)

    def _show(self) -> None:
        self._content += self._pending
        self._pending = ""

    def _until_call(self) -> None:
        text, opened, _ = self._pending.partition(CALL_OPEN)
        # White space before a call is no part of the text.
        shown = (text if opened else _before(text, CALL_OPEN)).rstrip()
        self._content += shown
        self._pending = self._pending[len(shown) :]
        if opened:
            self._step = self._hold

    def _unless_json(self) -> None:
        body = self._pending.lstrip()
        if body.startswith(("{", PYTHON_TAG)):
            self._step = self._hold
        elif not PYTHON_TAG.startswith(body):
            self._step = self._show

    def _hold(self) -> None:
        """Wait for the whole answer."""


def _before(text: str, tag: str) -> str:
    """The text without what may be the beginning of a tag."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    size = next((size for size in sizes if text.endswith(tag[:size])), 0)
    return text[: len(text) - size]
