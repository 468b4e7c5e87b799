"""The agent that most environments use: ask the model, do the tool calls, ask again.

It ends when a model call makes no tool call, is cut short (``incomplete_details``), or is the last
that ``max_steps`` allows. Output items go on unchanged, byte for byte, token fields included: the
next call's server takes the sampled tokens from them. Only routes (``routed_experts``) stay behind:
each item has those of all tokens before it, and no server reads them. The final response has them.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gymrl.gym.embedded.agent import AgentServer, Episode
from gymrl.gym.embedded.base import decode_fields, missing_field
from gymrl.gym.embedded.resources import RESERVED_NAMES
from gymrl.gym.schema import is_null, plain

ECHO_CHARS = 800
"""Bad arguments are quoted back to the model up to this length, so that they don't fill it."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_ABSENT = msgspec.Raw(b"")
_ROUTES = b'"routed_experts"'


class _Item(msgspec.Struct):
    type: msgspec.Raw = _ABSENT
    name: msgspec.Raw = _ABSENT
    arguments: msgspec.Raw = _ABSENT
    call_id: msgspec.Raw = _ABSENT


class SimpleAgent(AgentServer):
    """See the module."""

    async def responses(self, params: dict[str, msgspec.Raw], episode: Episode) -> bytes:
        """Run the loop. Raises what the episode's calls raise."""
        given = _input_items(params)
        outputs: list[msgspec.Raw] = []
        history: list[msgspec.Raw] = []
        usage: dict[str, Any] = {}
        step = 0
        while True:
            step += 1
            request = {**params, "input": [*given, *history]}
            if is_null(params.get("model", _ABSENT)):
                request["model"] = msgspec.Raw(msgspec.json.encode(self.peers.model_name))
            answer = self._decoded(await episode.ask_model(msgspec.json.encode(request)))
            items: list[msgspec.Raw] = msgspec.json.decode(answer["output"], type=list[msgspec.Raw])
            outputs += items
            history += [_without_routes(item) for item in items]
            usage = summed(usage, plain(answer.get("usage", _ABSENT)))
            calls = [c for c in (_tool_call(item) for item in items) if c is not None]
            if not calls or not is_null(answer.get("incomplete_details", _ABSENT)):
                break
            for call in calls:
                answered = await self._call(call, episode)
                outputs.append(answered)
                history.append(answered)
            if self.settings.max_steps is not None and step >= self.settings.max_steps:
                break
        final: dict[str, Any] = {**answer, "output": outputs, "usage": usage or None}
        return msgspec.json.encode(final)

    def _decoded(self, body: bytes) -> dict[str, msgspec.Raw]:
        try:
            answer = decode_fields(body)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = body[:200].decode("utf-8", "replace")
            raise self.inner_error(
                f"the model server's answer is no JSON object ({error}): {shown!r}", 502
            ) from error
        if is_null(answer.get("output", _ABSENT)):
            raise self.inner_error("the model server's answer has no output", 502)
        return answer

    async def _call(self, call: _Item, episode: Episode) -> msgspec.Raw:
        name, arguments = plain(call.name), plain(call.arguments)
        problem = _problem(name, arguments)
        if problem is None:
            output = await episode.call_tool(name, arguments.encode("utf-8", "replace"))
        else:
            output = msgspec.json.encode({"error": problem}).decode()
        item = {
            "type": "function_call_output",
            "call_id": call.call_id if not is_null(call.call_id) else None,
            "output": output,
        }
        return msgspec.Raw(msgspec.json.encode(item))


def _without_routes(item: msgspec.Raw) -> msgspec.Raw:
    if _ROUTES not in bytes(item):
        return item
    fields = msgspec.json.decode(item, type=dict[str, msgspec.Raw])
    if is_null(fields.pop("routed_experts", _ABSENT)):
        return item
    return msgspec.Raw(msgspec.json.encode(fields))


def _input_items(params: dict[str, msgspec.Raw]) -> list[msgspec.Raw]:
    """``input`` as a list of items; a string is one user message."""
    given = params.get("input", _ABSENT)
    if is_null(given):
        raise missing_field("input", sorted(params))
    if memoryview(given)[0] == ord('"'):
        message = {"content": given, "role": "user", "type": "message"}
        return [msgspec.Raw(msgspec.json.encode(message))]
    items: list[msgspec.Raw] = msgspec.json.decode(given, type=list[msgspec.Raw])
    return items


def _tool_call(raw: msgspec.Raw) -> _Item | None:
    item = msgspec.json.decode(raw, type=_Item)
    return item if plain(item.type) == "function_call" else None


def _problem(name: Any, arguments: Any) -> str | None:
    """What is wrong with a tool call before any server is asked, for the model to read."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in RESERVED_NAMES:
        return f"there is no tool called {str(name)[:ECHO_CHARS]!r}"
    shown = str(arguments)[:ECHO_CHARS]
    if not isinstance(arguments, str):
        return f"the arguments of {name} are no JSON text: {shown}"
    try:
        msgspec.json.decode(arguments.encode("utf-8", "replace"), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        return f"the arguments of {name} are no JSON object ({error}): {shown}"
    return None


def summed(usage: dict[str, Any], more: Any) -> dict[str, Any]:
    """Token counts of one more call added; counts inside details too. Null counts as nothing."""
    if not isinstance(more, dict):
        return usage
    result = dict(usage)
    for name, value in more.items():
        known = result.get(name)
        if isinstance(value, dict):
            result[name] = summed(known if isinstance(known, dict) else {}, value)
        elif type(value) is int and type(known) is int:
            result[name] = known + value
        elif known is None:
            result[name] = value
    return result
