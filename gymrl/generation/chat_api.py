"""``/v1/chat/completions`` and ``/tokenize``, with token ids the way vLLM writes them.

``prompt_token_ids`` at the top, ``token_ids`` on each choice, and with
``return_tokens_as_token_ids`` the log-probabilities' tokens read ``token_id:N``. The message itself
carries the three token fields as well, so that a client that sends it back as it came continues
from the sampled tokens.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import GenerationRequestError
from gymrl.generation.policy import Completion, Conversation, training_fields
from gymrl.generation.refused_fields import shown
from gymrl.generation.request_content import content_parts, content_text
from gymrl.generation.requests import (
    ChatMessage,
    ChatRequest,
    MessageCall,
    TokenizeRequest,
    check_text_format,
    check_tool_choice,
    template_variables,
)
from gymrl.generation.responses_api import chat_tool

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.config import SamplingParams
    from gymrl.generation.chat import ChatFormat

MAX_CHOICES = 128

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def conversation_of(
    request: ChatRequest | TokenizeRequest, reads: Callable[[str], bool] = lambda _: False
) -> Conversation:
    """The messages, tools and carried tokens of a request.

    Args:
        request: Of either route.
        reads: Whether the chat template reads a variable.

    Raises:
        GenerationRequestError: A message is malformed, naming its place.
    """
    sent = request.messages or []
    carriers = [i for i, message in enumerate(sent) if message.carries_tokens(f"messages[{i}]")]
    for i in carriers:
        if sent[i].role != "assistant":
            raise GenerationRequestError(
                f"messages[{i}] carries token ids, but only the assistant's messages may",
                param=f"messages[{i}].prompt_token_ids",
            )
    return Conversation(
        messages=[_template_message(message, f"messages[{i}]") for i, message in enumerate(sent)],
        tools=[chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or [])],
        may_call=check_tool_choice(getattr(request, "tool_choice", None)),
        prefixes={i: sent[i].tokens(f"messages[{i}]") for i in carriers[-1:]},
        template_kwargs=template_variables(
            request.chat_template_kwargs, getattr(request, "reasoning_effort", None), reads
        ),
    )


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise GenerationRequestError(
            f"{where}.role={shown(message.role)}: known roles are {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    read = content_text if role == "assistant" else content_parts
    made: dict[str, Any] = {"role": role, "content": read(message.content, f"{where}.content")}
    if message.name:
        made["name"] = message.name
    if role == "tool":
        made["tool_call_id"] = message.tool_call_id
    if role == "assistant":
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            made["reasoning_content"] = reasoning
        if message.tool_calls:
            made["tool_calls"] = [
                _template_call(call, f"{where}.tool_calls[{k}]")
                for k, call in enumerate(message.tool_calls)
            ]
        elif message.function_call is not None:
            call = MessageCall(function=message.function_call)
            made["tool_calls"] = [_template_call(call, where)]
    return made


def _template_call(call: MessageCall, where: str) -> dict[str, Any]:
    if call.function is None or not call.function.name:
        raise GenerationRequestError(
            f"{where}.function.name is missing", param=f"{where}.function.name"
        )
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def check_request(request: ChatRequest) -> int:
    """Refuse what this server can't do; the number of choices otherwise.

    Raises:
        GenerationRequestError: Naming the field.
    """
    check_text_format(request.response_format, "response_format")
    num_choices = 1 if request.n is None else request.n
    if not 1 <= num_choices <= MAX_CHOICES:
        raise GenerationRequestError(
            f"n={num_choices}: must be between 1 and {MAX_CHOICES}", param="n"
        )
    return num_choices


def choice_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of one of several choices: seeds that don't meet those of other requests."""
    if index == 0 or sampling.seed is None:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed}/{index}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(sampling, seed=int.from_bytes(digest, "big"))


def completion_of(
    request: ChatRequest, completions: list[Completion], chat: ChatFormat, model_name: str
) -> dict[str, Any]:
    """The answer's JSON object."""
    return envelope("chat.completion", model_name) | {
        "choices": [
            _choice(request, completion, index, chat)
            for index, completion in enumerate(completions)
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage_of(completions),
        "prompt_logprobs": None,
        "prompt_token_ids": completions[0].prompt_ids,
    }


def envelope(kind: str, model_name: str) -> dict[str, Any]:
    """What every answer and every chunk begins with."""
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model_name,
    }


def usage_of(completions: list[Completion]) -> dict[str, Any]:
    """Tokens used: the prompt once, every choice's sample."""
    num_prompt = len(completions[0].prompt_ids)
    num_sampled = sum(len(completion.generated.token_ids) for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _choice(
    request: ChatRequest, completion: Completion, index: int, chat: ChatFormat
) -> dict[str, Any]:
    generated, parsed = completion.generated, completion.parsed
    calls = tool_calls_of(request, completion)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": parsed.content if parsed.content or not calls else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": parsed.reasoning,
        "reasoning_content": parsed.reasoning,
        **training_fields(completion),
    }
    if calls:
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs_of(request, generated.token_ids, generated.logprobs, chat),
        "finish_reason": finish_reason_of(completion, bool(calls)),
        "stop_reason": generated.stop_reason,
        "token_ids": generated.token_ids,
    }


def tool_calls_of(request: ChatRequest, completion: Completion) -> list[dict[str, Any]]:
    """The calls of a choice; only the first when parallel calls are turned off."""
    calls = completion.parsed.tool_calls
    kept = calls[:1] if request.parallel_tool_calls is False else calls
    return [
        {
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in kept
    ]


def finish_reason_of(completion: Completion, has_calls: bool) -> str:
    """As the public schema names it."""
    reason = completion.generated.finish_reason
    return "tool_calls" if has_calls and reason == "stop" else reason


def logprobs_of(
    request: ChatRequest, token_ids: list[int], logprobs: list[float], chat: ChatFormat
) -> dict[str, Any] | None:
    """The log-probabilities, when they were asked for."""
    if not request.logprobs:
        return None
    as_ids = bool(request.return_tokens_as_token_ids)
    return {"content": chat.logprob_entries(token_ids, logprobs, as_ids=as_ids)}
