"""What rules read of a Gym answer and of a dataset row: small typed views over raw JSON.

Both views are built once for each trajectory and decode a field when a rule asks for it. Servers
and datasets put null, or something odd, where a field is optional; a view then has the neutral
value (an empty text, no flag), because a rule must not fail on what it does not need.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from gymrl.errors import GymSchemaError, RowValueError
from gymrl.numbers import finite_float

_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class OutputItem(msgspec.Struct, frozen=True):
    """One item of ``response.output``.

    Attributes:
        kind: Its ``type``; an item without one that has a role or content is a ``message``.
        role: Of a message, when it says so.
        text: All its text parts joined: the summary of a reasoning item (its content where the
            summary holds no text), the content of any other.
        generation_text: ``generation_str``, where the server kept the decoded tokens.
    """

    kind: str
    role: str | None = None
    text: str = ""
    generation_text: str | None = None

    @property
    def is_model_message(self) -> bool:
        """A message of the model; some agents append observations as messages of the user."""
        return self.kind == "message" and self.role in (None, "assistant")


class _Response(msgspec.Struct):
    output: Any = None
    incomplete_details: Any = None


class Answer:
    """The view over one answer of an agent's ``/run``.

    Args:
        result: The JSON object as bytes (:attr:`gymrl.types.Trajectory.result`).

    Raises:
        GymSchemaError: It is no JSON object, or nested beyond what can be read.
    """

    def __init__(self, result: bytes) -> None:
        try:
            self._fields = msgspec.json.decode(result, type=dict[str, msgspec.Raw])
        except _DECODE_ERRORS as error:
            raise GymSchemaError(
                f"the answer of /run is no readable JSON object: {error}", path="$"
            ) from error

    def value(self, name: str) -> Any:
        """A top-level field decoded, None when absent.

        Raises:
            GymSchemaError: The field cannot be read (a number beyond floats, deep nesting).
        """
        raw = self._fields.get(name)
        if raw is None:
            return None
        return _decoded(raw, name)

    @functools.cached_property
    def _response(self) -> _Response:
        raw = self._fields.get("response")
        if raw is None or _first_byte(raw) != b"{":
            return _Response()
        try:
            return msgspec.json.decode(raw, type=_Response)
        except _DECODE_ERRORS as error:
            raise GymSchemaError(f"response: {error}", path="response") from error

    @functools.cached_property
    def items(self) -> tuple[OutputItem, ...]:
        """``response.output`` in order; an item that is no object keeps its place as ``unknown``."""
        output = self._response.output
        if not isinstance(output, list):
            return ()
        return tuple(_item(value) for value in output)

    @functools.cached_property
    def incomplete_reason(self) -> str | None:
        """``response.incomplete_details.reason``, when there is such a text."""
        details = self._response.incomplete_details
        reason = details.get("reason") if isinstance(details, dict) else None
        return reason if isinstance(reason, str) else None

    @functools.cached_property
    def scalars(self) -> dict[str, float]:
        """Every top-level field that is a boolean or a finite number, as a float."""
        found = {}
        for name, raw in self._fields.items():
            number = _scalar(raw)
            if number is not None:
                found[name] = number
        return found


class RowBody:
    """The view over the JSON body of a row.

    Args:
        body: The JSON object as bytes (:attr:`gymrl.types.Row.body`).
        row: The row's index, for the error.

    Raises:
        RowValueError: It is no JSON object.
    """

    def __init__(self, body: bytes, row: int | None = None) -> None:
        try:
            self._fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except _DECODE_ERRORS as error:
            raise RowValueError(
                f"row {row}: its body is no readable JSON object: {error}", row=row
            ) from error

    def value(self, name: str) -> Any:
        """A top-level field decoded, None when absent. Nested keys are never looked at.

        Raises:
            GymSchemaError: The field cannot be read.
        """
        raw = self._fields.get(name)
        return None if raw is None else _decoded(raw, name)

    @functools.cached_property
    def last_user_text(self) -> str:
        """The text of the last user message of ``responses_create_params.input``.

        A plain string is that message. In a list it is the last item of role ``user``; the parts
        of its content are joined. Empty when there is none.
        """
        params = self.value("responses_create_params")
        given = params.get("input") if isinstance(params, dict) else None
        if isinstance(given, str):
            return given
        if not isinstance(given, list):
            return ""
        for item in reversed(given):
            if isinstance(item, dict) and item.get("role") == "user":
                return joined_text(item.get("content"))
        return ""


def finite_number(value: Any) -> float | None:
    """A boolean, int or float as a finite float; None for anything else."""
    return float(value) if isinstance(value, bool) else finite_float(value)


def joined_text(value: Any) -> str:
    """The text of a content or summary field: a string, or the texts of its parts joined."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_part_text(part) for part in value)
    return _part_text(value)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            text = part.get(key)
            if isinstance(text, str):
                return text
    return ""


def _item(value: Any) -> OutputItem:
    if not isinstance(value, dict):
        return OutputItem("unknown")
    kind, role = value.get("type"), value.get("role")
    if not isinstance(kind, str):
        kind = "message" if "content" in value or isinstance(role, str) else "unknown"
    text = joined_text(value.get("summary")) if kind == "reasoning" else ""
    generated = value.get("generation_str")
    return OutputItem(
        kind=kind,
        role=role if isinstance(role, str) else None,
        text=text or joined_text(value.get("content")),
        generation_text=generated if isinstance(generated, str) else None,
    )


def _decoded(raw: msgspec.Raw, name: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except _DECODE_ERRORS as error:
        raise GymSchemaError(f"{name}: {error}", path=name) from error


def _first_byte(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _scalar(raw: msgspec.Raw) -> float | None:
    if _first_byte(raw) not in b"-0123456789tf":
        return None
    try:
        return finite_number(msgspec.json.decode(raw))
    except msgspec.DecodeError:
        return None  # a number beyond floats has no mean to report
