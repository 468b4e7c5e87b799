"""The policy that is served: a generator and the chat format of its tokenizer, in one place.

Both HTTP APIs turn a request into a :class:`Conversation`, ask here for the prompt and for samples,
and dress the :class:`Completion` in their own shape.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
import msgspec

from gymrl.config import MediaConfig
from gymrl.errors import GenerationError, PrefixError
from gymrl.generation.answer_stream import AnswerStream, TextStream
from gymrl.generation.base import (
    Generated,
    Generator,
    SamplingParams,
    TokenCallback,
    check_logprobs,
)
from gymrl.generation.image_inputs import RequestImageReader
from gymrl.generation.images import ConversationImage, ImageGenerator, PromptImages
from gymrl.generation.ledger import Answer, RolloutLedger
from gymrl.generation.ledger_match import answer_keys, find_prefix
from gymrl.generation.parsing import ParsedText
from gymrl.generation.prefix import TruePrefix
from gymrl.routed_experts import encode_routes
from gymrl.telemetry import RateLimitedLog

if TYPE_CHECKING:
    from gymrl.generation.chat import ChatFormat
    from gymrl.generation.template_messages import Message

logger = logging.getLogger(__name__)

SHORT_BYTES = 4096
"""Of a conversation that is rendered in the event loop's own thread.

Handing it to another thread takes 0.2 ms, and up to 5 ms until that one gets the interpreter; so
much text takes a millisecond when nothing of it was tokenised before.
"""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What to answer.

    Attributes:
        messages: In the form that chat templates take.
        tools: In chat-completions form; shown to the model.
        may_call: Calls of those tools are read from the answer.
        prefixes: By place in `messages`: the tokens that an assistant message carries. Those of the
            newest one that carries any are enough.
        template_kwargs: Further variables of the template.
        images: What the parts ``{"type": "image"}`` of `messages` show, in order.
        ledger: Of the rollout that the call belongs to; what is sampled is recorded there.
        is_unmatched: See :class:`~gymrl.token_ledger.LedgerCall`.
        history: The key of its messages in a ledger; empty: not made yet.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    may_call: bool = True
    prefixes: dict[int, TruePrefix] = {}
    template_kwargs: dict[str, Any] | None = None
    images: tuple[ConversationImage, ...] = ()
    ledger: RolloutLedger | None = None
    is_unmatched: bool = False
    history: bytes = b""

    @property
    def is_short(self) -> bool:
        """Whether its prompt is made sooner than a thread takes it over."""
        shown = (self.messages, self.tools, self.template_kwargs)
        return not self.images and len(msgspec.json.encode(shown)) <= SHORT_BYTES

    def in_rollout(self, ledger: RolloutLedger) -> Conversation:
        """This conversation as a call of a rollout, continuing the answers that are known there.

        Raises:
            PrefixError: A message carries other tokens than those that were served.
        """
        found = find_prefix(self, ledger)
        return msgspec.structs.replace(
            self,
            ledger=ledger,
            prefixes=found.prefixes,
            is_unmatched=found.is_unmatched,
            history=found.history,
        )


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: the prompt's ids, the generation, and its text taken apart."""

    prompt_ids: list[int]
    generated: Generated
    parsed: ParsedText


class ServerClosingError(GenerationError):
    """The generator ended the call, to close or for new weights; another try may do."""


class Policy:
    """A generator with its chat format.

    Args:
        generator: Owned by the caller.
        chat: Of the generator's tokenizer.
        model_name: What ``/v1/models`` says.
        aliases: Further names that requests may use.
        on_rewrite: When the template rewrites history: ``error``, or start a new ``segment``
            (prompt with the template's ids; the rollout then sees that the turn does not continue
            the one before).
        images: Reads the images of requests; None: a request with images is refused.
    """

    def __init__(
        self,
        generator: Generator,
        chat: ChatFormat,
        *,
        model_name: str = "policy",
        aliases: Sequence[str] = (),
        on_rewrite: Literal["error", "segment"] = "error",
        images: RequestImageReader | None = None,
    ) -> None:
        self.images = RequestImageReader(None, MediaConfig()) if images is None else images
        self.generator = generator
        self.chat = chat
        self.model_name = model_name
        self._names = {model_name, *aliases}
        self._on_rewrite = on_rewrite
        # Rendering is Python and holds the interpreter: more threads would only queue up.
        self._render_limiter = anyio.CapacityLimiter(2)
        self._log = RateLimitedLog(logger)

    def knows(self, model: str | None) -> bool:
        """Whether a request may name `model`; no name is this model."""
        return model is None or model in self._names

    async def prompt(
        self, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The conversation's prompt ids, built on the most recent tokens it carries.

        Every image has as many tokens there as it has for the model.

        Raises:
            MediaError: The template does not show every image.
            PrefixError: The template rewrites history, and that is an error here.
            GenerationRequestError: The template refuses the conversation.
        """
        if conversation.is_short:
            return self._prompt(conversation, add_generation_prompt)
        return await anyio.to_thread.run_sync(
            self._prompt, conversation, add_generation_prompt, limiter=self._render_limiter
        )

    def _prompt(self, conversation: Conversation, add_generation_prompt: bool) -> list[int]:
        messages: list[Message] = conversation.messages
        tools, kwargs = conversation.tools, conversation.template_kwargs
        if conversation.prefixes:
            place = max(conversation.prefixes)
            prefix = conversation.prefixes[place]
            try:
                ids = self.chat.continue_from(
                    prefix,
                    messages,
                    place,
                    tools,
                    add_generation_prompt=add_generation_prompt,
                    template_kwargs=kwargs,
                )
            except PrefixError as error:
                if self._on_rewrite == "error":
                    raise
                self._log.log("segment", logging.WARNING, "starting a new segment: %s", error)
            else:
                num_kept = len(prefix.prompt_token_ids) + len(prefix.generation_token_ids)
                return self._with_regions(ids, conversation, num_kept, place)
        ids = self.chat.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=kwargs,
        )
        return self._with_regions(ids, conversation)

    def _with_regions(
        self, ids: list[int], conversation: Conversation, num_kept: int = 0, place: int = -1
    ) -> list[int]:
        """The images after message `place`, in place of what the template wrote for them."""
        image_format = self.images.format
        if image_format is None or not conversation.images:
            return ids
        new = [image for image in conversation.images if image.place > place]
        return image_format.expanded(ids, new, num_kept)

    async def sample(
        self,
        prompt_ids: list[int],
        conversation: Conversation,
        sampling: SamplingParams,
        on_token: TokenCallback | None = None,
    ) -> Completion:
        """One sample.

        Raises:
            MediaError: The prompt does not hold the images of the conversation.
            BadLogprobsError: A log-probability is missing or not a finite number.
            ServerClosingError: The generator closed; what was sampled is no sample of the policy.
            GenerationError: As :meth:`gymrl.generation.base.Generator.generate`.
        """
        ledger = conversation.ledger
        shown = self._shown(prompt_ids, conversation)
        if ledger is None:
            generated = await self._generate(prompt_ids, shown, sampling, on_token)
            return self._completion(prompt_ids, conversation, generated)
        number = ledger.begin()
        try:
            generated = await self._generate(prompt_ids, shown, sampling, on_token)
            completion = self._completion(prompt_ids, conversation, generated)
            parsed = completion.parsed
            answer = Answer(
                keys=tuple(answer_keys(conversation, parsed)),
                content="" if parsed.tool_calls else parsed.content,
                is_unmatched=conversation.is_unmatched,
            )
            ledger.record(number, prompt_ids, generated, answer, shown)
        finally:
            ledger.end()
        return completion

    async def complete(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        ledger: RolloutLedger | None = None,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """One continuation of bare tokens, outside of any conversation.

        Args:
            prompt_ids: What is continued.
            sampling: How.
            ledger: Of the rollout that the call belongs to.
            on_token: Told of every token.

        Raises:
            GymrlError: As :meth:`sample`.
        """
        number = None if ledger is None else ledger.begin()
        try:
            generated = await self.generator.generate(prompt_ids, sampling, on_token=on_token)
            _check_whole(generated)
            if ledger is not None and number is not None:
                answer = Answer(content=self.text(generated))
                ledger.record(number, prompt_ids, generated, answer)
        finally:
            if ledger is not None:
                ledger.end()
        return generated

    def _completion(
        self, prompt_ids: list[int], conversation: Conversation, generated: Generated
    ) -> Completion:
        _check_whole(generated)
        parsed = self.chat.parse(
            self.text(generated),
            conversation.tools if conversation.may_call else (),
            is_reasoning=self.chat.leaves_reasoning_open(prompt_ids),
            template_kwargs=conversation.template_kwargs,
        )
        return Completion(prompt_ids=prompt_ids, generated=generated, parsed=parsed)

    def _shown(self, prompt_ids: list[int], conversation: Conversation) -> PromptImages | None:
        image_format = self.images.format
        if image_format is None or not conversation.images:
            return None
        return image_format.located(prompt_ids, conversation.images)

    async def _generate(
        self,
        prompt_ids: list[int],
        shown: PromptImages | None,
        sampling: SamplingParams,
        on_token: TokenCallback | None,
    ) -> Generated:
        generator = self.generator
        if shown is None:
            return await generator.generate(prompt_ids, sampling, on_token=on_token)
        if not isinstance(generator, ImageGenerator):
            raise GenerationError(f"{type(generator).__name__} samples from tokens only")
        return await generator.generate_with_images(prompt_ids, shown, sampling, on_token=on_token)

    def answer_stream(
        self, prompt_ids: list[int], conversation: Conversation, sampling: SamplingParams
    ) -> AnswerStream:
        """Takes a sample of this prompt apart as its tokens come."""
        chat = self.chat
        may_call = bool(conversation.tools) and conversation.may_call
        return AnswerStream(
            TextStream(chat, sampling.stop),
            chat.tool_parser if may_call else "none",
            chat.reasoning_parser,
            is_open=chat.leaves_reasoning_open(prompt_ids),
        )

    def text(self, generated: Generated) -> str:
        """The generation's text, without the stop text that ended it and what came with it."""
        text = self.chat.decode(generated.token_ids)
        if isinstance(generated.stop_reason, str):
            return text.partition(generated.stop_reason)[0]
        return text


def _check_whole(generated: Generated) -> None:
    """Refuse what is no sample of the policy."""
    if generated.finish_reason == "abort":
        raise ServerClosingError(
            "the generation was ended before it was whole: the generator closed, or took new weights "
            "with pause='abort'; ask again"
        )
    check_logprobs(generated)


def training_fields(completion: Completion) -> dict[str, Any]:
    """What the last item or message of a call carries for training."""
    generated = completion.generated
    fields: dict[str, Any] = {
        "prompt_token_ids": completion.prompt_ids,
        "generation_token_ids": generated.token_ids,
        "generation_log_probs": generated.logprobs,
    }
    if generated.routed_experts is not None:
        fields["routed_experts"] = encode_routes(generated.routed_experts)
    return fields
