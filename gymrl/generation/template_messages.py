"""Messages as chat templates take them, made on copies.

**Templates without tools.** Small models' templates often ignore tools. They are then offered in
the system message, in hermes form, and earlier calls and answers are written as text in the same
form, so that such a model can be asked to use tools at all.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gymrl.generation.parsing import CALL_CLOSE, CALL_OPEN
from gymrl.generation.surrogates import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

Message = dict[str, Any]

TOOL_INSTRUCTION = """\
# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

To call one, reply with a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


def prepared(message: Message) -> Message:
    """A copy as templates want it: text or plain parts, arguments as mappings."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = [_plain_part(part) for part in content]
    copy = {**message, "content": content}
    calls = message.get("tool_calls")
    if calls:
        copy["tool_calls"] = [_prepared_call(call) for call in calls]
    else:
        copy.pop("tool_calls", None)
    return copy


def _plain_part(part: dict[str, Any]) -> dict[str, Any]:
    """A part without what it shows, which is no business of a template."""
    return {"type": "image"} if part["type"] == "image" else part


def in_parts(messages: list[Message]) -> list[Message]:
    """The same messages for a template that reads nothing but parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


def _prepared_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = arguments_mapping(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_mapping(arguments: Any) -> dict[str, Any]:
    """A call's arguments as the mapping that templates iterate over.

    Text is decoded. Nothing (missing, ``null``, empty) is an empty mapping. Anything else that is
    not an object, or does not parse, is wrapped as ``{"arguments": ...}`` so that it stays visible.
    """
    value = arguments
    if isinstance(arguments, str):
        try:
            value = read_json(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            value = arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": value}


def with_tools_as_text(messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Tools, calls and answers in hermes form, for a template that knows none of them."""
    written = [_as_text(message) for message in messages]
    if not tools:
        return written
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instruction = TOOL_INSTRUCTION.format(tools=signatures)
    if written[0]["role"] == "system":
        first = {**written[0], "content": _between("", written[0]["content"], f"\n\n{instruction}")}
        return [first, *written[1:]]
    return [{"role": "system", "content": instruction}, *written]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        content = _between("<tool_response>\n", message["content"], "\n</tool_response>")
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not calls:
        return message
    blocks = [
        f"{CALL_OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_CLOSE}"
        for call in calls
    ]
    parts = [message["content"], *blocks] if message["content"] else blocks
    return {"role": message["role"], "content": "\n".join(parts)}


def _between(before: str, content: Any, after: str) -> Any:
    """Content, text or parts, between two texts."""
    if isinstance(content, str):
        return before + content + after
    return [{"type": "text", "text": before}, *content, {"type": "text", "text": after}]
