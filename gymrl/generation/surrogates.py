"""Halves of characters (surrogates): JSON can spell them, UTF-8 can't, and neither can a tokenizer."""

from __future__ import annotations

import json
from typing import Any


def without_lone_surrogates(text: str) -> str:
    """The text with U+FFFD for every half of a character that has no other half."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_json(text: str) -> Any:
    """The value of a JSON text, numbers finite and characters whole.

    Raises:
        ValueError: It is no JSON, NaN and infinity among them, or has a number that no float can hold.
        RecursionError: It is nested too deeply.
    """
    value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    if "\\u" not in text and text.isascii():
        return value
    whole = json.dumps(value, ensure_ascii=False)
    return json.loads(without_lone_surrogates(whole))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is out of a float's range")
    return number
