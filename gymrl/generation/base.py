"""The generator protocol: prompt ids in, sampled ids and their log-probabilities out.

Nothing here imports torch. A generator knows token ids only; text, chat templates and HTTP are the
business of :mod:`gymrl.generation.chat` and :mod:`gymrl.generation.server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from gymrl.config import GenerationConfig, LogprobsMode, SamplingParams
from gymrl.errors import BadLogprobsError, ContextOverflowError, GenerationRequestError
from gymrl.types import RoutesArray

__all__ = [
    "FinishReason",
    "Generated",
    "GenerationConfig",
    "Generator",
    "LogprobsMode",
    "SamplingParams",
    "TokenCallback",
    "WeightSpan",
    "check_logprobs",
    "check_prompt",
    "fault_of",
    "in_this_loop",
    "token_budget",
]

FinishReason = Literal["stop", "length", "abort"]

TokenCallback = Callable[[int, float], None]
"""Called in the caller's event loop with each sampled id and its log-probability, in order."""


def in_this_loop(on_token: TokenCallback) -> TokenCallback:
    """`on_token` for another thread to call: it is called in the event loop that runs here."""
    loop = asyncio.get_running_loop()

    def deliver(token_id: int, logprob: float) -> None:
        # A closed loop has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(on_token, token_id, logprob)

    return deliver


class WeightSpan(NamedTuple):
    """Tokens ``[start, end)`` of a generation, and the version of the weights they came from."""

    version: str
    start: int
    end: int


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """What one call sampled.

    Attributes:
        token_ids: Every sampled token, the one that ended the generation included.
        logprobs: Of the sampling distribution at each of them (or of the model's own, in ``raw``
            mode); as long as `token_ids`.
        finish_reason: ``stop``: an end-of-turn token, a stop token or a stop text. ``length``: the
            budget is spent. ``abort``: the generator closed, or a weight update ended the call;
            what was sampled so far is here.
        stop_reason: The stop token or the stop text that ended it; None on an end-of-turn token.
        weight_versions: Spans that cover `token_ids` in order: more than one where the weights
            changed in the middle. Empty: the generator does not say.
        routed_experts: ``[T, L, K]``: the experts that each token of prompt and sample went
            through, -1 for the last one, which was not computed yet
            (:mod:`gymrl.routed_experts`). None where the generator does not say.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    weight_versions: list[WeightSpan] = []
    routed_experts: RoutesArray | None = None


@runtime_checkable
class Generator(Protocol):
    """Samples tokens. Implementations serve any number of concurrent calls."""

    @property
    def max_model_len(self) -> int:
        """Context in tokens, prompt and generation together."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """Sample one continuation of `prompt_ids`.

        `sampling.max_tokens` is clamped to what the context leaves. Cancelling the call frees its
        place before the next token.

        Raises:
            ContextOverflowError: The prompt leaves no room for a token.
            GenerationRequestError: The prompt is empty or holds an id outside the vocabulary.
            GenerationError: The generator failed, or is closed.
        """
        ...

    async def close(self) -> None:
        """End the calls in flight with ``abort`` and release the model. Safe to call twice."""
        ...


def fault_of(generator: Generator) -> str | None:
    """Why a generator serves no call any more; None: it serves.

    A generator tells by a property ``fault`` of that meaning, or by a boolean ``is_running``; one
    that has neither is taken to serve.
    """
    if hasattr(generator, "fault"):
        fault: str | None = generator.fault
        return fault
    return None if getattr(generator, "is_running", True) else "the generator has ended"


def token_budget(num_prompt_tokens: int, sampling: SamplingParams, max_model_len: int) -> int:
    """How many tokens a call may sample: `max_tokens`, or less where the context ends.

    Raises:
        ContextOverflowError: The prompt leaves no room for a token.
    """
    room = max_model_len - num_prompt_tokens
    if room <= 0:
        raise ContextOverflowError(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt holds "
            f"{num_prompt_tokens} tokens and leaves no room to generate; shorten the prompt or "
            "raise max_model_len",
            prompt_tokens=num_prompt_tokens,
            max_model_len=max_model_len,
        )
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def check_prompt(prompt_ids: Sequence[int], vocab_size: int | None) -> None:
    """Refuse an empty prompt, and ids that the model has no embedding for.

    Args:
        prompt_ids: The prompt.
        vocab_size: Of the model; None: not known.

    Raises:
        GenerationRequestError: With the position of the first bad id.
    """
    if len(prompt_ids) == 0:
        raise GenerationRequestError("the prompt holds no token", param="prompt")
    for position, token_id in enumerate(prompt_ids):
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            fault = _fault_of_token(token_id, vocab_size)
            raise GenerationRequestError(
                f"prompt token {token_id} at position {position} {fault}",
                param="prompt",
                position=position,
            )


def check_stop_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse stop tokens that can never come.

    Raises:
        GenerationRequestError: Naming the first of them.
    """
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise GenerationRequestError(
                f"stop_token_ids: token {token_id} {_fault_of_token(token_id, vocab_size)}",
                param="stop_token_ids",
            )


def _fault_of_token(token_id: int, vocab_size: int | None) -> str:
    if token_id < 0:
        return "is negative"
    return f"is outside the vocabulary of {vocab_size} tokens"


def check_logprobs(generated: Generated) -> None:
    """Hold a generator to one finite log-probability for each sampled token.

    Raises:
        BadLogprobsError: They are too few or too many, or one is NaN or infinite.
    """
    if len(generated.logprobs) != len(generated.token_ids):
        raise BadLogprobsError(
            f"the generator gave {len(generated.logprobs)} log-probabilities for "
            f"{len(generated.token_ids)} tokens"
        )
    for position, logprob in enumerate(generated.logprobs):
        if not math.isfinite(logprob):
            raise BadLogprobsError(
                f"the log-probability of sampled token {position} is {logprob}", position=position
            )
