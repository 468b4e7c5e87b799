"""Fields of requests that are refused by name, because ignoring them would change what comes back.

Each table has fields by name with the values at which they do nothing; null is always one. A field of
another API (`max_tokens` on ``/v1/responses``, say) is refused as well where it would do something, with
the name that it has here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymrl.errors import GenerationRequestError

Neutral = Mapping[str, tuple[Any, ...]]
"""Fields by name, each with the values at which it does nothing."""

_PLAIN_TEXT = {"type": "text"}

_NO_SAMPLING: Neutral = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logits_processors": (None, []),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_detection": (None,),
    "repetition_penalty": (None, 1),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "watermarking": (None, False),
}

NO_PROMPT: Neutral = {
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "kv_transfer_params": (None, {}),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "prompt_embeds": (None, []),
    "truncate_prompt_tokens": (None,),
}
"""What would make another prompt."""

_NO_ANSWER: Neutral = {
    "echo": (None, False),
    "logprob_token_ids": (None, []),
    "prompt_logprobs": (None,),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
}

SAMPLED: Neutral = {**_NO_SAMPLING, **NO_PROMPT, **_NO_ANSWER}
"""On every route that samples."""

_CONVERSED: Neutral = {
    **SAMPLED,
    "add_special_tokens": (None, False),
    "conversation": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": (None, False),
    "prompt": (None,),
    "skip_special_tokens": (None, True),
    "suffix": (None, ""),
}

RESPONSES: Neutral = {
    **_CONVERSED,
    "logprobs": (None, False),
    "max_completion_tokens": (None,),
    "max_tokens": (None,),
    "messages": (None,),
    "n": (None, 1),
    "reasoning_effort": (None,),
    "response_format": (None, {}, _PLAIN_TEXT),
}

CHAT: Neutral = {
    **_CONVERSED,
    "add_generation_prompt": (None, True),
    "audio": (None,),
    "input": (None,),
    "instructions": (None, ""),
    "max_output_tokens": (None,),
    "modalities": (None, [], ["text"]),
    "previous_response_id": (None,),
    "reasoning": (None, {}),
    "text": (None, {}, {"format": _PLAIN_TEXT}),
    "web_search_options": (None,),
}

COMPLETIONS: Neutral = {
    **SAMPLED,
    "chat_template_kwargs": (None, {}),
    "functions": (None, []),
    "input": (None,),
    "instructions": (None, ""),
    "max_completion_tokens": (None,),
    "max_output_tokens": (None,),
    "messages": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {}, _PLAIN_TEXT),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
}

IN_RESPONSES: Mapping[str, str] = {
    "functions": "tools",
    "logprobs": 'include=["message.output_text.logprobs"]',
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""What fields of other APIs are called there."""

IN_CHAT: Mapping[str, str] = {
    "functions": "tools",
    "input": "messages",
    "instructions": "a message of the role system",
    "max_output_tokens": "max_completion_tokens",
    "reasoning": "reasoning_effort",
    "text": "response_format",
}

IN_COMPLETIONS: Mapping[str, str] = {
    "input": "prompt",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "messages": "prompt",
}

_MAX_SHOWN = 200


def shown(value: Any) -> str:
    """A value for an error message, the beginning of it where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def refuse(values: Mapping[str, Any], fields: Neutral, here: Mapping[str, str]) -> None:
    """Refuse what a request asks for and this route does not have.

    Args:
        values: The request.
        fields: What is refused.
        here: What fields of other APIs are called on this route.

    Raises:
        GenerationRequestError: Naming the field.
    """
    for name, neutral in fields.items():
        if values.get(name) in neutral:
            continue
        remedy = (
            f"is no field of this route; use {here[name]}"
            if name in here
            else "is not supported by this server; leave it out"
        )
        raise GenerationRequestError(f"{name}={shown(values[name])} {remedy}", param=name)
