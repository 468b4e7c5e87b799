"""The JSON of a ``/run`` answer as structs, decoded once at the edge.

Only what gymrl reads is typed. Everything else, the verifier's own fields above all, is never
decoded: it stays in the bytes of the answer and goes on as it came. Fields that may hold anything
are kept as slices of those bytes (:class:`msgspec.Raw`), so that a field that is present and null
reads like one that is absent, and a value of the wrong type can be named.

Real servers send bytes that no JSON parser should accept. Two such faults are common enough to be
mended and counted: half of a surrogate pair in a string, and bare ``NaN`` or ``Infinity``. The rest
is a :class:`~gymrl.errors.GymSchemaError` that says where.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from gymrl.errors import GymSchemaError
from gymrl.gym.lifting import TOKEN_FIELDS, lift_token_lists
from gymrl.gym.splice import without_token_fields

ABSENT = msgspec.Raw(b"")
NULL = b"null"
EXCERPT_CHARS = 200
"""An error quotes at most this much of a body."""

LONG_BODY_BYTES = 64 << 10
"""Longer answers are decoded without their token lists."""

LENGTH_REASONS = frozenset(
    {"max_output_tokens", "length", "max_tokens", "max_model_len", "context_length_exceeded"}
)
"""``incomplete_details.reason`` values that mean: cut by a token limit."""


class OutputItem(msgspec.Struct):
    """One item of ``response.output``. The last item of each model call carries token fields."""

    type: msgspec.Raw = ABSENT
    role: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT
    output: msgspec.Raw = ABSENT
    summary: msgspec.Raw = ABSENT
    prompt_token_ids: msgspec.Raw = ABSENT
    generation_token_ids: msgspec.Raw = ABSENT
    generation_log_probs: msgspec.Raw = ABSENT
    routed_experts: msgspec.Raw = ABSENT


class Response(msgspec.Struct):
    """The final response: the output of all model calls and what the environment put between."""

    output: list[OutputItem] | None = None
    incomplete_details: msgspec.Raw = ABSENT


class RunAnswer(msgspec.Struct):
    """What ``/run`` answers: the verifier's answer with the response inside."""

    response: Response | None = None
    reward: msgspec.Raw = ABSENT
    reward_components: msgspec.Raw = ABSENT
    mask_sample: msgspec.Raw = ABSENT
    instance_config: msgspec.Raw = ABSENT
    scorer_error: msgspec.Raw = ABSENT
    failure_class: msgspec.Raw = msgspec.field(name="_ng_failure_class", default=ABSENT)
    failure_terminal: msgspec.Raw = msgspec.field(name="_ng_failure_terminal", default=ABSENT)
    failure_message: msgspec.Raw = msgspec.field(name="_ng_failure_message", default=ABSENT)


class DecodedAnswer(msgspec.Struct, frozen=True):
    """A decoded answer with its bytes.

    Attributes:
        answer: The structs.
        body: The bytes that slices point into, mended where they had to be. Those of a long answer
            have no token fields any more; the slices have bytes of their own then.
        notes: What was mended, counted by name.
    """

    answer: RunAnswer
    body: bytes
    notes: dict[str, int]


DecodedT = TypeVar("DecodedT")

_decoder = msgspec.json.Decoder(RunAnswer)


def is_null(raw: msgspec.Raw) -> bool:
    """Whether the field is absent or null."""
    view = memoryview(raw)
    return len(view) == 0 or view == NULL


def is_turn(item: OutputItem) -> bool:
    """Whether an item was sampled: its ``generation_token_ids`` are there and not an empty list.

    A value of the wrong type counts, so that whoever reads the ids says what is wrong.
    """
    if is_null(item.generation_token_ids):
        return False
    text = bytes(item.generation_token_ids)
    return not text.startswith(b"[") or bool(text[1:-1].strip())


def plain(raw: msgspec.Raw) -> Any:
    """The field's value as plain data; None when it is absent."""
    if is_null(raw):
        return None
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError:  # a number out of a float's range; json reads it as infinite
        return json.loads(bytes(raw))


def excerpt(body: bytes) -> str:
    """The beginning of a body for an error message, at most `EXCERPT_CHARS` characters."""
    text = body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace")
    return text if len(text) <= EXCERPT_CHARS else f"{text[:EXCERPT_CHARS]}..."


def decode_answer(body: bytes) -> DecodedAnswer:
    """Decode the body of a ``/run`` answer.

    Raises:
        GymSchemaError: It is no JSON object of the protocol's shape; `path` names the place
            where that is known.
    """
    if len(body) > LONG_BODY_BYTES:
        decoded = _decode_lifted(body)
        if decoded is not None:
            return decoded
    try:
        answer, mended, notes = decode_mending(_decoder, body)
    except RecursionError:
        path = deepest_path(body)
        raise GymSchemaError(
            f"the answer nests too deeply to be read, at {path}", path=path
        ) from None
    except msgspec.ValidationError as error:
        raise GymSchemaError(
            f"the answer does not have the protocol's shape: {error}", path=path_of(error)
        ) from error
    except msgspec.DecodeError as error:
        raise GymSchemaError(
            f"the answer is not JSON ({error}); it begins with {excerpt(body)!r}",
            path="$",
            body=excerpt(body),
        ) from error
    return DecodedAnswer(answer, mended, notes)


def _decode_lifted(body: bytes) -> DecodedAnswer | None:
    """Decode around the token lists; None where the plain way has to look (and say what is wrong)."""
    body, notes = _mend_bytes(body)
    lifted = lift_token_lists(body)
    if lifted is None:
        return None
    try:
        answer = _decoder.decode(lifted.skeleton)
        response = answer.response or Response()
        rest = lifted.restored(without_token_fields(lifted.skeleton, response))
    except (msgspec.DecodeError, RecursionError):
        return None
    for item in response.output or []:
        for name in TOKEN_FIELDS:
            text = lifted.lists.get(bytes(getattr(item, name)))
            if text is not None:
                setattr(item, name, msgspec.Raw(text))
    return DecodedAnswer(answer, rest, notes)


def decode_mending(
    decoder: msgspec.json.Decoder[DecodedT], body: bytes
) -> tuple[DecodedT, bytes, dict[str, int]]:
    """Decode JSON; where that fails, mend what :func:`mend` can and decode again.

    Returns:
        The value, the bytes it was decoded from, and what was mended, counted by name.

    Raises:
        msgspec.DecodeError: It is no JSON, even when mended, or not of the decoder's type.
        RecursionError: It nests too deeply.
    """
    body, notes = _mend_bytes(body)
    try:
        return decoder.decode(body), body, notes
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended, more = mend(body)
        if not more:
            raise
        return decoder.decode(mended), mended, notes | more


def path_of(error: msgspec.ValidationError) -> str:
    """The place a validation error speaks of, as ``$.response.output[3]``."""
    found = re.search(r"at `(\$[^`]*)`$", str(error))
    return found.group(1) if found else "$"


_ESCAPE = re.compile(
    rb"\\(?:u([dD][89abAB][0-9a-fA-F]{2})(\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
    rb"|u([dD][c-fC-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def _mend_bytes(body: bytes) -> tuple[bytes, dict[str, int]]:
    """Drop a byte order mark and replace bytes that are not UTF-8; decoding would let both pass."""
    body = body.removeprefix(b"\xef\xbb\xbf")
    if body.isascii():
        return body, {}
    try:
        body.decode()
    except UnicodeDecodeError:
        before = body.count(b"\xef\xbf\xbd")
        body = body.decode("utf-8", "replace").encode()
        return body, {"replaced_bytes": body.count(b"\xef\xbf\xbd") - before}
    return body, {}


def mend(body: bytes) -> tuple[bytes, dict[str, int]]:
    """Replace halves of surrogate pairs by U+FFFD and bare NaN or Infinity by null.

    Returns:
        The bytes, and how many of each: ``replaced_surrogates``, ``replaced_nonfinite``. Empty
        when there was nothing to mend.
    """
    surrogates = nonfinite = 0

    def mend_escape(match: re.Match[bytes]) -> bytes:
        nonlocal surrogates
        high, low, lone_low = match.groups()
        if (high and not low) or lone_low:
            surrogates += 1
            return rb"\ufffd"
        return match.group()

    def mend_number(match: re.Match[bytes]) -> bytes:
        nonlocal nonfinite
        if match.group().startswith(b'"'):
            return match.group()
        nonfinite += 1
        return NULL

    if b"\\ud" in body or b"\\uD" in body:
        body = _ESCAPE.sub(mend_escape, body)
    if b"NaN" in body or b"Infinity" in body:
        body = _NONFINITE.sub(mend_number, body)
    counts = {"replaced_surrogates": surrogates, "replaced_nonfinite": nonfinite}
    return body, {name: count for name, count in counts.items() if count}


# One that is cut off goes to the end and is not tried again from each quote in it.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_NONFINITE = re.compile(_STRING + rb"|-?\b(?:NaN|Infinity)\b", re.DOTALL)


_STRUCTURE = re.compile(_STRING + rb"|[\[\]{},:]", re.DOTALL)
_PATH_PARTS = 12


def deepest_path(body: bytes, depth: int = 200) -> str:
    """The path of the first value that lies `depth` levels down, shortened to its first parts."""
    path: list[str | int] = []
    last_string = ""
    for match in _STRUCTURE.finditer(body):
        token = match.group()
        if token in (b"{", b"["):
            path.append("" if token == b"{" else 0)
            if len(path) > depth:
                break
        elif token in (b"}", b"]"):
            if path:
                path.pop()
        elif token == b":" and path:
            path[-1] = last_string
        elif token == b"," and path:
            current = path[-1]
            path[-1] = current + 1 if isinstance(current, int) else ""
        elif token.startswith(b'"'):
            last_string = token[1:-1].decode("utf-8", "replace")
    shown = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path[:_PATH_PARTS])
    return f"${shown}..." if len(path) > _PATH_PARTS else f"${shown}"
