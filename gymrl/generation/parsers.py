"""Which parsers read a model's tool calls and reasoning: a few of our own, and vLLM's.

Our own need nothing: ``hermes`` and ``llama_json`` for calls, ``think`` for reasoning. Every other
name is looked for in the registries of vLLM, where it is installed. ``auto`` reads the name off the
chat template.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

from gymrl.generation import parsing
from gymrl.generation.parsing import CALL_OPEN, PYTHON_TAG, THINK_CLOSE, THINK_OPEN
from gymrl.generation.vllm_parsers import VllmCallReader, VllmReasoningReader

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# What templates write of forms that vLLM alone reads, most telling first.
_VLLM_MARKS = (
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<\uff5cDSML\uff5c", "deepseek_v32"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
)
_DEEPSEEK_MARK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"


class CallReader(Protocol):
    """Reads calls in a text."""

    keeps_special_tokens: bool
    """Whether it reads special tokens too, which are then left in the text."""

    def read(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, tuple[parsing.ToolCall, ...]]:
        """The text without its calls, and those calls. What does not parse stays in the text."""
        ...


class ReasoningReader(Protocol):
    """Takes reasoning out of a text."""

    keeps_special_tokens: bool
    """As :class:`CallReader` has it."""

    def read(
        self, text: str, *, is_open: bool, template_kwargs: dict[str, Any] | None
    ) -> tuple[str | None, str]:
        """Reasoning, None where there is none, and the rest.

        Args:
            text: The generation.
            is_open: The prompt ended inside of reasoning.
            template_kwargs: Variables of the template that wrote the prompt.
        """
        ...


class _Hermes:
    keeps_special_tokens = False

    def read(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, tuple[parsing.ToolCall, ...]]:
        return parsing.parse_hermes(text)


class _LlamaJson:
    keeps_special_tokens = False

    def read(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, tuple[parsing.ToolCall, ...]]:
        return parsing.parse_llama_json(text)


class _Think:
    keeps_special_tokens = False

    def read(
        self, text: str, *, is_open: bool, template_kwargs: dict[str, Any] | None
    ) -> tuple[str | None, str]:
        return parsing.split_reasoning(text, is_open=is_open)


def tool_parser_of(template: str, *, has_tools: bool, has_vllm: bool) -> str:
    """The parser of the calls that a template writes; ``none`` where no parser is here for them.

    Args:
        template: The chat template.
        has_tools: It shows tools. One that doesn't is given them in hermes form.
        has_vllm: Parsers of vLLM's may be named.
    """
    if not has_tools:
        return "hermes"
    name = next((name for mark, name in _VLLM_MARKS if mark in template), None)
    if _DEEPSEEK_MARK in template:
        name = "deepseek_v3" if "```json" in template else "deepseek_v31"
    if name is not None:
        return name if has_vllm else "none"
    if CALL_OPEN in template:
        return "hermes"
    if PYTHON_TAG in template or '"parameters"' in template:
        return "llama_json"
    return "none"


def reasoning_parser_of(template: str, vocabulary: Collection[str]) -> str:
    """``think`` where the template or the vocabulary has the tag, else ``none``."""
    return "think" if THINK_CLOSE in template or THINK_OPEN in vocabulary else "none"


def call_reader(name: str, tokenizer: Any) -> CallReader | None:
    """The parser of a name; None for ``none``.

    Raises:
        ConfigError: Neither we nor vLLM have it, or it does not fit the tokenizer.
    """
    own: dict[str, CallReader | None] = {
        "none": None,
        "hermes": _Hermes(),
        "llama_json": _LlamaJson(),
    }
    if name in own:
        return own[name]
    return VllmCallReader(name, tokenizer)


def reasoning_reader(name: str, tokenizer: Any) -> ReasoningReader | None:
    """The parser of a name; None for ``none``.

    Raises:
        ConfigError: As :func:`call_reader`.
    """
    if name == "none":
        return None
    if name == "think":
        return _Think()
    return VllmReasoningReader(name, tokenizer)


def has_vllm() -> bool:
    """Whether vLLM is installed; it is not imported."""
    return importlib.util.find_spec("vllm") is not None
