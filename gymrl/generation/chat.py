"""Conversations to token ids and generations to messages, by the tokenizer's chat template.

A message is a plain dictionary as chat templates take it: ``role``, ``content`` (text, or parts
``{"type": "text", "text"}`` and ``{"type": "image"}``), and on an assistant's ``reasoning_content`` and ``tool_calls``
(``{"type": "function", "function": {"name", "arguments"}}``). Messages of a caller are never
changed; what a template needs is made on copies (:mod:`gymrl.generation.template_messages`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gymrl.errors import GenerationRequestError, PrefixError
from gymrl.generation.parsers import (
    call_reader,
    has_vllm,
    reasoning_parser_of,
    reasoning_reader,
    tool_parser_of,
)
from gymrl.generation.parsing import (
    CALL_CLOSE,
    CALL_OPEN,
    PYTHON_TAG,
    THINK_CLOSE,
    THINK_OPEN,
    ParsedText,
)
from gymrl.generation.prefix import TruePrefix, splice
from gymrl.generation.segments import TurnEncoder
from gymrl.generation.template_messages import Message, in_parts, prepared, with_tools_as_text
from gymrl.generation.token_bytes import token_bytes

if TYPE_CHECKING:
    from gymrl.config import GenerationConfig

logger = logging.getLogger(__name__)

PLAIN_TEXT = "It is 12 degrees,  and\n(x + 1) * 2 = 6!"
_PROBE = "\u00b6probe\u00b6"


class ChatFormat:
    """One tokenizer's way to write conversations.

    Args:
        tokenizer: A transformers tokenizer with a chat template. Its truncation and padding are
            turned off.
        end_ids: End-of-turn tokens that the model's configuration names. The tokenizer's own, and
            the one that the template writes after an assistant's text, are added.
        tool_parser: How calls are spelled; ``auto`` reads it off the template. See
            :mod:`gymrl.generation.parsers`.
        reasoning_parser: ``auto``: ``think`` where the template or the vocabulary has the tag.

    Raises:
        GenerationRequestError: The tokenizer has no chat template.
        ConfigError: A parser is not there, or does not fit the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Sequence[int] = (),
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        if not tokenizer.chat_template:
            raise GenerationRequestError(
                "the tokenizer has no chat template; add one to its directory "
                "(chat_template.jinja), or use an instruct model",
                param="model",
            )
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # From here on the backend is only read, so threads may share it.
            self._backend.no_truncation()
            self._backend.no_padding()
        template = self._template_text()
        self._takes_parts_only = False
        self._takes_parts_only = self._refuses_text()
        self.template_has_tools = self._renders_tools()
        vocabulary = tokenizer.get_vocab()
        if tool_parser == "auto":
            tool_parser = tool_parser_of(
                template, has_tools=self.template_has_tools, has_vllm=has_vllm()
            )
        if reasoning_parser == "auto":
            reasoning_parser = reasoning_parser_of(template, vocabulary)
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self._calls = call_reader(tool_parser, tokenizer)
        self._reasoning = reasoning_reader(reasoning_parser, tokenizer)
        own_end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.end_ids = frozenset({*end_ids, *own_end, *self._template_end_ids()})
        self._hidden_ids = self._hidden(vocabulary) | self.end_ids
        self._turns = None if self._backend is None else TurnEncoder(self._backend, self.end_ids)
        read = self.read_back(PLAIN_TEXT)
        if read != PLAIN_TEXT and self.knows(PLAIN_TEXT):
            logger.warning(
                "the tokenizer (%s) does not give texts back: %r becomes %r; `gymrl doctor --model` "
                "says more",
                type(tokenizer).__name__,
                PLAIN_TEXT,
                read,
            )

    @classmethod
    def from_config(
        cls, tokenizer: Any, config: GenerationConfig, end_ids: Sequence[int] = ()
    ) -> ChatFormat:
        """With the parsers that `config` names."""
        return cls(
            tokenizer,
            end_ids=end_ids,
            tool_parser=config.tool_parser,
            reasoning_parser=config.reasoning_parser,
        )

    def _hidden(self, vocabulary: dict[str, int]) -> frozenset[int]:
        """Special tokens that no parser reads."""
        if any(r is not None and r.keeps_special_tokens for r in (self._calls, self._reasoning)):
            return frozenset()
        tags = {CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE, PYTHON_TAG}
        tag_ids = {vocabulary[tag] for tag in tags if tag in vocabulary}
        return frozenset(self.tokenizer.all_special_ids) - tag_ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text` as it is; nothing is put before or after.

        Args:
            text: Any text.
            add_special_tokens: Put around it what the tokenizer puts around a text of its own.
        """
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def knows(self, text: str) -> bool:
        """Whether the vocabulary has all of `text`; that of a few words has not."""
        unknown = self.tokenizer.unk_token_id
        return unknown is None or unknown not in self.encode(text)

    def reads(self, variable: str) -> bool:
        """Whether the template mentions a variable of this name."""
        return variable in self._template_text()

    def read_back(self, text: str) -> str:
        """What a model reads where `text` is meant, white space around it aside."""
        read: str = self.tokenizer.decode(self.encode(text), skip_special_tokens=False)
        return read.strip()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a generation: turn markers and other special tokens left out, tags kept."""
        shown = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        text: str = self.tokenizer.decode(shown, skip_special_tokens=False)
        return text

    def logprob_entries(
        self, token_ids: Sequence[int], logprobs: Sequence[float], *, as_ids: bool = False
    ) -> list[dict[str, Any]]:
        """Log-probabilities as OpenAI's APIs write them.

        Args:
            token_ids: Of a generation.
            logprobs: Of each.
            as_ids: Tokens read ``token_id:N``.
        """
        entries = []
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            text: str = self.tokenizer.decode([token_id])
            piece: str = self.tokenizer.convert_ids_to_tokens(token_id)
            token = f"token_id:{token_id}" if as_ids else text
            spelled = token.encode() if as_ids else token_bytes(text, piece)
            entry = {"token": token, "logprob": logprob, "bytes": list(spelled)}
            entries.append({**entry, "top_logprobs": []})
        return entries

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """The conversation's token ids.

        Args:
            messages: At least one.
            tools: In chat-completions form, ``{"type": "function", "function": {...}}``.
            add_generation_prompt: Open the assistant's turn at the end.
            template_kwargs: Further variables of the template (``enable_thinking``, ...).

        Raises:
            GenerationRequestError: There is no message, or the template refuses them.
        """
        text = self.write(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        return self.encode(text) if self._turns is None else self._turns.encode(text)

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The conversation's text, from the template; see :meth:`render`.

        Raises:
            GenerationRequestError: As there.
        """
        if not messages:
            raise GenerationRequestError("the conversation holds no message", param="input")
        copies = [prepared(message) for message in messages]
        if not self.template_has_tools:
            copies = with_tools_as_text(copies, tools)
        if self._takes_parts_only:
            copies = in_parts(copies)
        try:
            text: str = self.tokenizer.apply_chat_template(
                copies,
                tools=list(tools) if tools and self.template_has_tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except Exception as error:  # whatever a jinja template may raise, on this request's data
            raise GenerationRequestError(
                f"the chat template refused the conversation: {type(error).__name__}: {error}",
                param="input",
            ) from error
        return text

    def continue_from(
        self,
        prefix: TruePrefix,
        messages: Sequence[Message],
        place: int,
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of the next turn, built on the tokens that were sampled.

        Args:
            prefix: What ``messages[place]`` carries.
            messages: The whole conversation.
            place: Of the most recent assistant message that carries tokens.
            tools: As for :meth:`render`.
            add_generation_prompt: As for :meth:`render`.
            template_kwargs: As for :meth:`render`.

        Raises:
            PrefixError: See :func:`gymrl.generation.prefix.splice`.
        """

        def render(part: Sequence[Message], opens_turn: bool = False) -> list[int]:
            return self.render(
                part, tools, add_generation_prompt=opens_turn, template_kwargs=template_kwargs
            )

        whole = render(messages, add_generation_prompt)
        upto = render(messages[: place + 1])
        before = self._rendered_before(render, messages[:place])
        start = _agreed(before, upto)
        try:
            return splice(prefix, whole, upto, self.end_ids, start)
        except PrefixError as error:
            is_of_this_message = error.expected is not None and (error.position or 0) >= start
            is_last = place + 1 == len(messages)
            if not is_of_this_message or _has_reasoning(messages[place]) or is_last:
                raise
        # Some templates write a last message differently from the same message further up (Qwen3
        # gives it an empty block of reasoning). With no reasoning to lose that is no rewriting:
        # see the message as the one before the next.
        num_ends = len(self._ends(upto, start))
        upto = render(messages[: place + 2])
        start = _agreed(before, upto)
        # The message's own text may spell end-of-turn tokens; the last of them closes it.
        ends = self._ends(upto, start)[:num_ends]
        return splice(prefix, whole, upto[: ends[-1] + 1] if ends else upto, self.end_ids, start)

    def _ends(self, ids: Sequence[int], start: int) -> list[int]:
        """Where `ids` has end-of-turn tokens, from `start` on."""
        return [place for place in range(start, len(ids)) if ids[place] in self.end_ids]

    def _rendered_before(
        self, render: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message]
    ) -> list[int]:
        if not messages:
            return []
        try:
            return render(messages)
        except GenerationRequestError:
            # Some templates refuse a conversation that has no user's message yet.
            return []

    def parse(
        self,
        text: str,
        tools: Sequence[dict[str, Any]] = (),
        *,
        is_reasoning: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> ParsedText:
        """A generation's text taken apart.

        Args:
            text: As :meth:`decode` gives it.
            tools: Those that may be called; without them nothing is a call.
            is_reasoning: The prompt left the reasoning open.
            template_kwargs: As for :meth:`render`, of the prompt.
        """
        reasoning = None
        if self._reasoning is not None:
            reasoning, text = self._reasoning.read(
                text, is_open=is_reasoning, template_kwargs=template_kwargs
            )
        if tools and self._calls is not None:
            content, calls = self._calls.read(text, tools)
            return ParsedText(content, reasoning, calls)
        return ParsedText(text, reasoning)

    def leaves_reasoning_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends with the opening tag of reasoning."""
        if self.reasoning_parser != "think":
            return False
        tail: str = self.tokenizer.decode(list(prompt_ids[-8:]), skip_special_tokens=False)
        return tail.rstrip().endswith(THINK_OPEN)

    def image_text(self) -> str | None:
        """What the template writes for an image in a user's message; None: nothing."""
        parts = [
            {"type": "text", "text": _PROBE},
            {"type": "image"},
            {"type": "text", "text": _PROBE},
        ]
        rendered = self._probe([{"role": "user", "content": parts}])
        if rendered is None or rendered.count(_PROBE) != 2:
            return None
        return rendered.split(_PROBE)[1] or None

    def _template_text(self) -> str:
        template = self.tokenizer.chat_template
        return template if isinstance(template, str) else json.dumps(template)

    def _probe(self, messages: list[Message], **variables: Any) -> str | None:
        """What the template makes of an artificial conversation; None when it refuses it."""
        if self._takes_parts_only:
            messages = in_parts(messages)
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except Exception:  # noqa: BLE001 - a template may raise anything; refusing is an answer
            return None
        return text

    def _renders_tools(self) -> bool:
        function = {"name": _PROBE, "description": "", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        rendered = self._probe([{"role": "user", "content": "x"}], tools=tools)
        return rendered is not None and _PROBE in rendered

    def _refuses_text(self) -> bool:
        """Whether the template reads content in parts only."""
        parts = [{"type": "text", "text": _PROBE}]
        shown = [
            self._probe([{"role": "user", "content": content}]) or "" for content in (_PROBE, parts)
        ]
        return _PROBE not in shown[0] and _PROBE in shown[1]

    def _template_end_ids(self) -> list[int]:
        """The special token that the template writes right after an assistant's text."""
        rendered = self._probe(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}],
            add_generation_prompt=False,
        )
        if rendered is None or _PROBE not in rendered:
            return []
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        after = self.encode(rendered.rpartition(_PROBE)[2])
        return [next(i for i in after if i in special)] if special.intersection(after) else []


def _agreed(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids both begin with; at a border, tokens may merge with what follows."""
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _has_reasoning(message: Message) -> bool:
    return bool(message.get("reasoning_content")) or THINK_CLOSE in (message.get("content") or "")
