"""What the model answered, as a verifier sees it: texts and tool calls, tokens left out."""

from __future__ import annotations

from typing import Any

import msgspec

from gymrl.gym.conduct import text_of
from gymrl.gym.lifting import TRAINING_FIELDS
from gymrl.gym.schema import is_null, plain


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call that the model made, and what the tool answered (None: never answered)."""

    name: str
    arguments: str
    output: str | None = None


class _Response(msgspec.Struct):
    output: list[dict[str, msgspec.Raw]] | None = None
    incomplete_details: msgspec.Raw = msgspec.Raw(b"")


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The final response of an episode.

    Attributes:
        items: Its output items as plain data, without the training fields.
        incomplete_reason: Why the last call was cut short, if it was.
    """

    items: tuple[dict[str, Any], ...]
    incomplete_reason: str | None = None

    @classmethod
    def of(cls, response: msgspec.Raw) -> Reply:
        """From a response's JSON.

        Raises:
            msgspec.ValidationError: It is no response.
        """
        decoded = msgspec.json.decode(response, type=_Response)
        details = plain(decoded.incomplete_details)
        reason = details.get("reason") if isinstance(details, dict) else None
        return cls(
            items=tuple(
                {name: plain(raw) for name, raw in item.items() if name not in TRAINING_FIELDS}
                for item in decoded.output or []
            ),
            incomplete_reason=reason if isinstance(reason, str) else None,
        )

    @property
    def text(self) -> str:
        """The text of the last assistant message; empty when there is none."""
        for item in reversed(self.items):
            if item.get("type") == "message" and item.get("role") in (None, "assistant"):
                return text_of(item.get("content"))
        return ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls in order."""
        outputs = {
            item.get("call_id"): str(item.get("output"))
            for item in self.items
            if item.get("type") == "function_call_output"
        }
        return tuple(
            ToolCall(
                str(item.get("name")),
                str(item.get("arguments")),
                outputs.get(item.get("call_id")),
            )
            for item in self.items
            if item.get("type") == "function_call"
        )


def fields_as_data(fields: dict[str, msgspec.Raw], *left_out: str) -> dict[str, Any]:
    """Members of an object as plain data, some left out."""
    return {
        name: None if is_null(raw) else plain(raw)
        for name, raw in fields.items()
        if name not in left_out
    }
