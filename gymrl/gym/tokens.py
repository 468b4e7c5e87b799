"""Token ids and log-probabilities out of JSON bytes, and the proof that turns are contiguous.

Each turn repeats the whole prompt, so a long rollout's JSON grows with the square of its turns.
Reading it need not: the text of a turn's prompt begins with the text of the prompt before and of
what was sampled after it, which comparing bytes shows at memory speed, and only what is new is
parsed. Where the spelling differs (other white space, say) the ids themselves are compared.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gymrl.numbers import finite_float

if TYPE_CHECKING:
    from gymrl.types import Float32Array, Int32Array

MAX_TOKEN_ID = 2**31 - 1
WINDOW = 8
"""Ids shown on each side of the first difference."""

_WHITE = b" \t\r\n"
_ID_BYTES = b"0123456789," + _WHITE
_COMMA, _SPACE, _ZERO = b", 0"
_SEPARATOR = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_integers = msgspec.json.Decoder(list[int])
_floats = msgspec.json.Decoder(list[float])


class TokenListError(ValueError):
    """A list of ids or log-probabilities is not one. `position` is the first bad element."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class BrokenPrefixError(ValueError):
    """A prompt does not begin with the tokens so far.

    Args:
        position: First position at which the two differ.
        expected: Ids so far, around that position.
        received: Ids of the prompt, around that position.
    """

    def __init__(self, position: int, expected: list[int], received: list[int]) -> None:
        super().__init__(f"position {position}: expected {expected}, received {received}")
        self.position = position
        self.expected = expected
        self.received = received


def parse_ids(text: bytes) -> Int32Array:
    """The token ids of a JSON array.

    Args:
        text: A valid JSON value.

    Raises:
        TokenListError: It is no array, or an element is no integer from 0 to `MAX_TOKEN_ID`.
    """
    return _parse_inner(_inner(text), text)


def _inner(text: bytes) -> bytes:
    if not text.startswith(b"[") or not text.endswith(b"]"):
        raise TokenListError(f"not a list but {_short(text)}")
    return text[1:-1].strip(_WHITE)


def _parse_inner(inner: bytes, whole: bytes) -> Int32Array:
    if not inner:
        return np.empty(0, dtype=np.int32)
    if _is_plain(inner):
        ids = np.fromstring(inner, dtype=np.int64, sep=",")
    elif inner.translate(None, _ID_BYTES):
        raise _bad_id(whole)
    else:
        try:
            ids = np.array(_integers.decode(b"[" + inner + b"]"), dtype=np.int64)
        except (msgspec.DecodeError, OverflowError):
            raise _bad_id(whole) from None
    if int(ids.max()) > MAX_TOKEN_ID:
        raise _bad_id(whole)
    return ids.astype(np.int32)


def _is_plain(inner: bytes) -> bool:
    """Whether it is JSON's integers with ``,`` or ``, `` between each two, as servers write them.

    The quick parser takes these as they are, and would read less well-formed text wrongly.
    """
    separators = inner.translate(None, b"0123456789")
    count = len(separators)
    if separators == b"," * count:
        before_number = _COMMA
    elif separators == b", " * (count // 2):
        before_number = _SPACE
    else:
        return False
    text = np.frombuffer(inner, dtype=np.uint8)
    if text[0] < _ZERO or text[-1] < _ZERO or inner[:1] == b"0":
        return inner == b"0"
    here, after = text[:-1], text[1:]
    starts = here == before_number
    if (starts & (after < _ZERO)).any():
        return False  # nothing between two separators
    if before_number == _SPACE and ((here == _COMMA) & (after != _SPACE)).any():
        return False  # numbers with a space alone between them
    has_leading_zero = starts[:-1] & (after[:-1] == _ZERO) & (after[1:] >= _ZERO)
    return not has_leading_zero.any()


def _bad_id(whole: bytes) -> TokenListError:
    try:
        values = json.loads(whole)
    except ValueError as error:
        return TokenListError(f"not a list of token ids: {_short(whole)} ({error})")
    for position, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= MAX_TOKEN_ID:
            return TokenListError(
                f"element {position} is {_short(json.dumps(value).encode())}, "
                f"not an integer from 0 to {MAX_TOKEN_ID}",
                position,
            )
    return TokenListError(f"not a list of token ids: {_short(whole)}")


def _short(text: bytes) -> str:
    shown = text[:60].decode("utf-8", "replace")
    return shown if len(text) <= 60 else f"{shown}..."


def parse_logprobs(text: bytes, count: int) -> Float32Array:
    """The log-probabilities of `count` sampled tokens.

    -9999.0, which engines send for a token of probability zero, is a number like any other.

    Args:
        text: A valid JSON value, or nothing when the field is absent.
        count: How many there must be.

    Raises:
        TokenListError: They are absent, fewer or more than `count`, or one is null, no number,
            or not finite as float32.
    """
    if text in (b"", b"null"):
        raise TokenListError(f"absent, for {count} sampled tokens")
    try:
        values = _floats.decode(text)
    except msgspec.DecodeError:
        raise _unread_logprobs(text) from None
    if len(values) != count:
        raise TokenListError(
            f"{len(values)} for {count} sampled tokens", position=min(len(values), count)
        )
    with np.errstate(over="ignore"):
        logprobs = np.array(values, dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise _bad_logprob(values, text)
    return logprobs


def _unread_logprobs(text: bytes) -> TokenListError:
    try:
        values = json.loads(text)
    except ValueError as error:
        return TokenListError(f"not a list of numbers: {_short(text)} ({error})")
    return _bad_logprob(values, text)


def _bad_logprob(values: Any, text: bytes) -> TokenListError:
    if not isinstance(values, list):
        return TokenListError(f"not a list but {_short(text)}")
    largest = float(np.finfo(np.float32).max)
    for position, value in enumerate(values):
        number = finite_float(value)
        if number is None or abs(number) > largest:
            shown = _short(json.dumps(value).encode())
            return TokenListError(f"element {position} is {shown}, not a finite number", position)
    return TokenListError(f"not a list of numbers: {_short(text)}")


class TokenSequence:
    """The tokens of one trajectory, grown turn by turn, each prompt checked against all before."""

    def __init__(self) -> None:
        self._chunks: list[Int32Array] = []
        self._prompt = b""
        self._generation = b""
        self.length = 0

    def extend(self, prompt: bytes, generation: bytes) -> tuple[int, int]:
        """Add one turn.

        Args:
            prompt: ``prompt_token_ids`` as JSON text.
            generation: ``generation_token_ids`` as JSON text.

        Returns:
            How many tokens the prompt added, and how many were sampled.

        Raises:
            BrokenPrefixError: The prompt does not begin with the tokens so far. The sequence is
                as before.
            TokenListError: One of the two is no list of ids.
        """
        inner = _inner(prompt)
        start = self._new_from(inner)
        if start is None:
            added = self._after_comparing(_parse_inner(inner, prompt))
        else:
            added = _parse_inner(inner[start:], prompt)
        sampled = parse_ids(generation)
        self._chunks += [added, sampled]
        self._prompt, self._generation = inner, _inner(generation)
        self.length += len(added) + len(sampled)
        return len(added), len(sampled)

    def array(self) -> Int32Array:
        """int32 ``[T]``: all tokens so far."""
        return np.concatenate(self._chunks) if self._chunks else np.empty(0, dtype=np.int32)

    def _new_from(self, inner: bytes) -> int | None:
        """Where the new tokens of a prompt begin, if its text begins with the text so far."""
        end = 0
        for known in (self._prompt, self._generation):
            if not known:
                continue
            if end:
                separator = _SEPARATOR.match(inner, end)
                if separator is None:
                    return None
                end = separator.end()
            if not inner.startswith(known, end):
                return None
            end += len(known)
        if end in (0, len(inner)):
            return end
        # Without a separator here the last id only begins like ours: 12 and 123.
        separator = _SEPARATOR.match(inner, end)
        return None if separator is None else separator.end()

    def _after_comparing(self, prompt: Int32Array) -> Int32Array:
        seen = self.array()
        common = min(len(seen), len(prompt))
        different = np.flatnonzero(seen[:common] != prompt[:common])
        position = int(different[0]) if len(different) else common
        if position < len(seen):
            window = slice(max(0, position - WINDOW), position + WINDOW)
            raise BrokenPrefixError(position, seen[window].tolist(), prompt[window].tolist())
        return prompt[len(seen) :]
