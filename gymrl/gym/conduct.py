"""What an output item says beside its tokens: tool calls spelled out in text, stray thinking tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymrl.config import GymConfig
from gymrl.gym.schema import is_null, plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gymrl.gym.schema import OutputItem

DEFAULT_INVALID_TOOL_CALL_PATTERNS: tuple[str, ...] = GymConfig().invalid_tool_call_patterns
DEFAULT_THINKING_TAGS: tuple[str, ...] = GymConfig().thinking_tags


def detect_invalid_tool_call_and_malformed_thinking(
    item: Mapping[str, Any],
    invalid_tool_call_patterns: Sequence[str] | None = None,
    thinking_tags: Sequence[str] | None = None,
) -> tuple[bool, bool]:
    """Flag the final output item of a model call.

    In a message any thinking tag is malformed: thinking must not leak into the answer. In a
    reasoning summary only a repeated tag is: one pair is expected. A tool-call pattern in the
    text of either means a call that was spelled out instead of made.

    Args:
        item: The output item as plain data. Null or missing text counts as none.
        invalid_tool_call_patterns: None takes the defaults.
        thinking_tags: None takes the defaults.

    Returns:
        ``(is_invalid_tool_call, has_malformed_thinking)``.
    """
    patterns = (
        DEFAULT_INVALID_TOOL_CALL_PATTERNS
        if invalid_tool_call_patterns is None
        else invalid_tool_call_patterns
    )
    tags = DEFAULT_THINKING_TAGS if thinking_tags is None else thinking_tags
    answer = text_of(item.get("content"))
    reasoning = text_of(item.get("summary"))
    invalid = any(pattern in answer or pattern in reasoning for pattern in patterns)
    malformed = any(tag in answer or reasoning.count(tag) > 1 for tag in tags)
    return invalid, malformed


def text_of(content: Any) -> str:
    """The text of ``content`` or ``summary``: a string, or a list of parts with ``text``."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "".join(part for part in parts if isinstance(part, str))


def flags_of(item: OutputItem, patterns: Sequence[str], tags: Sequence[str]) -> tuple[bool, bool]:
    """As above, for a decoded item; what holds no text is not decoded."""
    if is_null(item.content) and is_null(item.summary):
        return False, False
    return detect_invalid_tool_call_and_malformed_thinking(
        {"content": plain(item.content), "summary": plain(item.summary)}, patterns, tags
    )
