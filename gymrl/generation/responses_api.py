"""``/v1/responses``: the Responses API, with the token fields that training needs.

The last output item of a call carries ``prompt_token_ids``, ``generation_token_ids`` and
``generation_log_probs``, and ``routed_experts`` where the generator returns them. Agents send items back as they came; the most recent one that carries
tokens is where the next prompt continues from.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from gymrl.errors import GenerationRequestError
from gymrl.generation.policy import Completion, Conversation, training_fields
from gymrl.generation.refused_fields import shown
from gymrl.generation.request_content import content_parts, content_text
from gymrl.generation.requests import (
    InputItem,
    ResponsesRequest,
    check_text_format,
    check_tool_choice,
    template_variables,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.generation.chat import ChatFormat
    from gymrl.generation.parsing import ToolCall
    from gymrl.generation.prefix import TruePrefix

LOGPROBS = "message.output_text.logprobs"
"""What `include` names for the log-probabilities of texts."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_KINDS = {str: "a text", dict: "an object"}


def check_request(request: ResponsesRequest) -> None:
    """Refuse what this server, which keeps no state between calls, can't do.

    Raises:
        GenerationRequestError: Naming the field.
    """
    if request.previous_response_id:
        raise GenerationRequestError(
            "previous_response_id: this server keeps no conversations; send the whole input",
            param="previous_response_id",
        )
    if request.background:
        raise GenerationRequestError(
            "background: this server answers while the client waits; leave it out",
            param="background",
        )
    text = request.text or {}
    check_text_format(text.get("format"), "text.format")
    if text.get("verbosity") not in (None, "medium"):
        raise GenerationRequestError(
            f"text.verbosity={shown(text['verbosity'])} is not supported by this server; ask for it in the prompt",
            param="text.verbosity",
        )


def conversation_of(
    request: ResponsesRequest, reads: Callable[[str], bool] = lambda _: False
) -> Conversation:
    """The messages, tools and carried tokens of a request.

    Args:
        request: What is asked.
        reads: Whether the chat template reads a variable.

    Raises:
        GenerationRequestError: An item is malformed or of a kind this server does not know,
            naming its place.
    """
    builder = _MessageBuilder()
    if request.instructions:
        builder.add({"role": "system", "content": request.instructions})
    items = (
        [InputItem(role="user", content=request.input)]
        if isinstance(request.input, str)
        else request.input
    )
    for i, item in enumerate(items):
        builder.take(item, f"input[{i}]")
    builder.close()
    return Conversation(
        messages=builder.messages,
        tools=[chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or [])],
        may_call=check_tool_choice(request.tool_choice),
        prefixes=builder.prefixes(),
        template_kwargs=template_variables(request.chat_template_kwargs, _effort(request), reads),
    )


def _effort(request: ResponsesRequest) -> str | None:
    effort = (request.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise GenerationRequestError(
            f"reasoning.effort={shown(effort)} must be a text", param="reasoning.effort"
        )
    return effort


class _MessageBuilder:
    """Gathers the items of one assistant turn (reasoning, text, calls) into one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._carrier: tuple[int, InputItem, str] | None = None
        self._turn: dict[str, Any] | None = None

    def prefixes(self) -> dict[int, TruePrefix]:
        """What the newest item that carries tokens carries."""
        if self._carrier is None:
            return {}
        place, item, where = self._carrier
        return {place: item.tokens(where)}

    def add(self, message: dict[str, Any]) -> None:
        self.close()
        self.messages.append(message)

    def close(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn)
            self._turn = None

    def take(self, item: InputItem, where: str) -> None:
        kind = item.type or ("message" if item.role else None)
        if kind == "message":
            self._take_message(item, where)
        elif kind == "function_call":
            self._take_call(item, where)
        elif kind == "function_call_output":
            content = content_parts(item.output, f"{where}.output")
            self.add({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif kind == "reasoning":
            self._take_reasoning(item, where)
        else:
            raise GenerationRequestError(
                f"{where}.type={shown(item.type)}: known types are message, function_call, "
                "function_call_output and reasoning",
                param=f"{where}.type",
            )
        if item.carries_tokens(where):
            if self._turn is None:
                raise GenerationRequestError(
                    f"{where} carries token ids, but only the assistant's items may",
                    param=f"{where}.prompt_token_ids",
                )
            # Tokens sit on the last item of a call, so the turn ends here.
            self._carrier = len(self.messages), item, where
            self.close()

    def _take_message(self, item: InputItem, where: str) -> None:
        role = _ROLES.get(item.role or "")
        if role is None:
            raise GenerationRequestError(
                f"{where}.role={shown(item.role)}: known roles are {', '.join(_ROLES)}",
                param=f"{where}.role",
            )
        if role != "assistant":
            self.add({"role": role, "content": content_parts(item.content, f"{where}.content")})
            return
        content = content_text(item.content, f"{where}.content")
        if self._turn is not None and ("content" in self._turn or "tool_calls" in self._turn):
            self.close()
        self._open_turn()["content"] = content

    def _take_call(self, item: InputItem, where: str) -> None:
        if not item.name:
            raise GenerationRequestError(f"{where}.name is missing", param=f"{where}.name")
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._open_turn().setdefault("tool_calls", []).append(call)

    def _take_reasoning(self, item: InputItem, where: str) -> None:
        if self._turn is not None and ("content" in self._turn or "tool_calls" in self._turn):
            self.close()
        text = content_text(item.summary, f"{where}.summary")
        text = text or content_text(item.content, f"{where}.content")
        turn = self._open_turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant"}
        return self._turn


def chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool in chat-completions form, from either form.

    Raises:
        GenerationRequestError: It is no function tool, has no name, or its description or parameters are
            of the wrong type.
    """
    if tool.get("type") != "function":
        raise GenerationRequestError(
            f"{where}.type={shown(tool.get('type'))}: only function tools are supported",
            param=f"{where}.type",
        )
    function = tool.get("function") or tool
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise GenerationRequestError(f"{where}.name is missing", param=f"{where}.name")
    for field, kind in (("description", str), ("parameters", dict)):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise GenerationRequestError(
                f"{where}.{field}={shown(value)} must be {_KINDS[kind]}", param=f"{where}.{field}"
            )
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        },
    }


def included_logprobs(
    request: ResponsesRequest, completion: Completion, chat: ChatFormat
) -> list[dict[str, Any]] | None:
    """Log-probabilities of all tokens of the call, where `include` asks for those of texts."""
    if LOGPROBS not in (request.include or ()):
        return None
    generated = completion.generated
    return chat.logprob_entries(generated.token_ids, generated.logprobs)


def response_of(
    request: ResponsesRequest,
    completion: Completion,
    model_name: str,
    logprobs: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The answer's JSON object; every field of the public schema is there.

    Args:
        request: What was asked.
        completion: What was sampled.
        model_name: As the answer says it.
        logprobs: Of the message's text; see :func:`included_logprobs`.
    """
    is_cut = completion.generated.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    output = _output_items(
        completion, status, logprobs, keep_all_calls=request.parallel_tool_calls is not False
    )
    output[-1] |= training_fields(completion)
    num_prompt, num_sampled = len(completion.prompt_ids), len(completion.generated.token_ids)
    return opened_response(request, model_name) | {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        },
    }


_ALWAYS_NULL = (
    "background",
    "completed_at",
    "conversation",
    "error",
    "incomplete_details",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "top_logprobs",
    "truncation",
    "usage",
)


def opened_response(request: ResponsesRequest, model_name: str) -> dict[str, Any]:
    """The answer's JSON object before anything was sampled."""
    return dict.fromkeys(_ALWAYS_NULL) | {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": float(int(time.time())),
        "status": "in_progress",
        "instructions": request.instructions,
        "metadata": request.metadata,
        "model": model_name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": request.temperature,
        "tool_choice": request.tool_choice or "auto",
        "tools": [_echoed_tool(tool) for tool in request.tools or []],
        "top_p": request.top_p,
        "max_output_tokens": request.max_output_tokens,
        "reasoning": request.reasoning,
        "text": request.text,
        "user": request.user,
    }


def _output_items(
    completion: Completion,
    status: str,
    logprobs: list[dict[str, Any]] | None,
    *,
    keep_all_calls: bool,
) -> list[dict[str, Any]]:
    parsed = completion.parsed
    calls = parsed.tool_calls if keep_all_calls else parsed.tool_calls[:1]
    items: list[dict[str, Any]] = []
    if parsed.reasoning:
        summary = [{"type": "summary_text", "text": parsed.reasoning}]
        items.append(
            {
                "id": f"rs_{uuid.uuid4().hex}",
                "type": "reasoning",
                "summary": summary,
                "encrypted_content": None,
            }
        )
    if parsed.content or not calls:
        text: dict[str, Any] = {
            "type": "output_text",
            "text": parsed.content,
            "annotations": [],
            "logprobs": logprobs,
        }
        items.append(
            {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    items.extend(_call_item(call) for call in calls)
    return items


def _call_item(call: ToolCall) -> dict[str, Any]:
    call_id = f"call_{uuid.uuid4().hex}"
    return {
        "id": call_id,
        "type": "function_call",
        "call_id": call_id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _echoed_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **tool}
