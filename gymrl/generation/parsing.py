"""Tool calls and reasoning in a model's text (pure).

What does not parse is never lost and never an error: it stays in the visible text, tags included,
where the rollout's invalid-tool-call patterns find it. Work is linear in the text.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gymrl.generation.surrogates import read_json

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolCall(msgspec.Struct, frozen=True):
    """A call the model made: the tool's name and its arguments as a JSON object's text."""

    name: str
    arguments: str


class ParsedText(msgspec.Struct, frozen=True):
    """A generation taken apart.

    Attributes:
        content: What is left for the reader; malformed tool calls stay in it.
        reasoning: Between the thinking tags; None when there was none.
        tool_calls: In order.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


def split_reasoning(text: str, *, is_open: bool = False) -> tuple[str | None, str]:
    """Reasoning and the rest.

    The first closing tag ends the reasoning; further tags stay in the rest. A text that opens
    reasoning and never closes it is reasoning as a whole.

    Args:
        text: The generation.
        is_open: The prompt ended with the opening tag.
    """
    body = text.lstrip()
    if body.startswith(THINK_OPEN):
        body, is_open = body[len(THINK_OPEN) :], True
    elif not is_open:
        return None, text
    reasoning, closed, rest = body.partition(THINK_CLOSE)
    return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""


def parse_hermes(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Calls written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    An opening tag without its closing one, and a block that holds anything but one call, stay in
    the text as they are.

    Returns:
        The text without the calls that were read, and those calls.
    """
    calls: list[ToolCall] = []
    visible: list[str] = []
    position = 0
    while (close := text.find(CALL_CLOSE, position)) >= 0:
        end = close + len(CALL_CLOSE)
        start = text.rfind(CALL_OPEN, position, close)
        call = _read_call(text[start + len(CALL_OPEN) : close]) if start >= 0 else None
        if call is None:
            visible.append(text[position:end])
        else:
            visible.append(text[position:start])
            calls.append(call)
        position = end
    visible.append(text[position:])
    content = "".join(visible)
    return (content.rstrip() if calls else content), tuple(calls)


def parse_llama_json(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Calls written as bare JSON, ``{"name": ..., "parameters": {...}}``, several with ``;`` between.

    The text is either calls as a whole or no call at all.
    """
    body = text.strip().removeprefix(PYTHON_TAG).strip()
    if not body.startswith("{"):
        return text, ()
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        start = position
        try:
            _, position = decoder.raw_decode(body, start)
            value = read_json(body[start:position])
        except (ValueError, RecursionError):
            return text, ()
        call = _call_of(value)
        if call is None:
            return text, ()
        calls.append(call)
        while position < len(body) and (body[position] == ";" or body[position].isspace()):
            position += 1
    return "", tuple(calls)


def _read_call(block: str) -> ToolCall | None:
    try:
        return _call_of(read_json(block))
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any) -> ToolCall | None:
    """The call that `value` spells out, if its name is a name and its arguments are an object."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
