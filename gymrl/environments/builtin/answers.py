"""What of a model's text is its answer."""

from __future__ import annotations

import re
from typing import Literal

AnswerExtractor = Literal["whole", "last_integer", "first_word", "answer_tag"]

_INTEGER = re.compile(r"-?\d+")
_OPEN, _CLOSE = "<answer>", "</answer>"
_FENCE = "```"


def extract_answer(text: str, extractor: AnswerExtractor) -> str | None:
    """The part of `text` that is scored; None when it holds no such thing.

    ``whole``: all of it, stripped. ``last_integer``: its last run of digits, with a minus sign
    before it. ``first_word``: up to the first white space, less punctuation at its ends.
    ``answer_tag``: inside its last ``<answer>...</answer>``, stripped.
    """
    if extractor == "whole":
        return text.strip() or None
    if extractor == "last_integer":
        found = _INTEGER.findall(text)
        return found[-1] if found else None
    if extractor == "first_word":
        words = text.split(maxsplit=1)
        return (words[0].strip(".,;:!?\"'`*()[]") or None) if words else None
    return last_tagged(text, "answer")


def last_tagged(text: str, tag: str, *, may_be_open: bool = False) -> str | None:
    """What stands inside the last ``<tag>...</tag>``, stripped; None without one, or if empty.

    Args:
        text: Searched from its end, in time linear in its length; upper and lower case are one.
        tag: Without brackets.
        may_be_open: The closing tag may be missing at the end of the text: a stop text that ended
            the generation need not be part of it.
    """
    lowered = text.lower()
    # Some letters change their length in lower case; offsets must be those of `text`.
    source = lowered if len(lowered) == len(text) else text
    opening, closing = f"<{tag}>", f"</{tag}>"
    close = source.rfind(closing)
    last_open = source.rfind(opening)
    if may_be_open and last_open > close:
        return text[last_open + len(opening) :].strip() or None
    if close < 0:
        return None
    start = source.rfind(opening, 0, close)
    return None if start < 0 else text[start + len(opening) : close].strip() or None


def last_code_block(text: str) -> str | None:
    """The last closed fenced block (three backticks, any language); None without one."""
    parts = text.split(_FENCE)
    # Odd parts stand between fences; the last of them may lack its closing fence.
    for index in range(len(parts) - 2, 0, -1):
        if index % 2:
            first, _, body = parts[index].partition("\n")
            code = body if not first.strip() or first.strip().isidentifier() else parts[index]
            return code.rstrip("\n") + "\n" if code.strip() else None
    return None
