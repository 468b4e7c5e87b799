"""``/v1/completions``: plain continuations of a text or of token ids, whole or streamed.

No chat template takes part. Each choice carries ``token_ids`` and its prompt's ``prompt_token_ids``,
as vLLM writes them, and ``weight_versions``. A server of gymrl can so stand where :mod:`gymrl.generation.vllm_http` expects
one of vLLM's.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from gymrl.config import SamplingParams
from gymrl.errors import GenerationRequestError
from gymrl.generation import refused_fields
from gymrl.generation.answer_stream import TextStream
from gymrl.generation.chat_api import MAX_CHOICES, choice_sampling
from gymrl.generation.chunks import Chunks, write_chunks
from gymrl.generation.requests import SampledRequest, StreamOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.generation.base import Generated, TokenCallback
    from gymrl.generation.chunks import Events
    from gymrl.generation.ledger import RolloutLedger
    from gymrl.generation.policy import Policy

DEFAULT_MAX_TOKENS = 16
"""The public API's own default."""


class CompletionRequest(SampledRequest, kw_only=True):
    """``POST /v1/completions``.

    Attributes:
        prompt: A text or token ids; a list of either is a batch.
        max_tokens: None is 16, as the public API has it.
        n: Choices of each prompt.
        logprobs: 0 gives those of the sampled tokens; more, the likeliest others, are not here.
        add_special_tokens: Put what the tokenizer puts around a text, such as a beginning of text;
            on unless it is false.
        return_token_ids: Off only when it is false.
        return_tokens_as_token_ids: Tokens of the log-probabilities read ``token_id:N``.
        skip_special_tokens: Leave special tokens out of the text; on unless it is false.
        include_stop_str_in_output: Keep the stop text, and what came with it, in the text.
        suffix: Must be empty.
    """

    refused: ClassVar[refused_fields.Neutral] = refused_fields.COMPLETIONS
    called_here: ClassVar[Mapping[str, str]] = refused_fields.IN_COMPLETIONS

    prompt: str | list[int | str | list[int]]
    max_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    suffix: str | None = None
    stream_options: StreamOptions | None = None


class _Job(msgspec.Struct, frozen=True):
    """One choice: its prompt, and how it is sampled."""

    prompt_ids: list[int]
    sampling: SamplingParams


def check_request(request: CompletionRequest) -> None:
    """Refuse what this server can't do.

    Raises:
        GenerationRequestError: Naming the field.
    """
    if request.suffix:
        raise GenerationRequestError(
            "suffix: texts are only continued; put what follows into the prompt", param="suffix"
        )
    if request.logprobs:
        raise GenerationRequestError(
            f"logprobs={request.logprobs}: only those of sampled tokens are here; ask for 0",
            param="logprobs",
        )


def jobs_of(request: CompletionRequest, policy: Policy) -> list[_Job]:
    """Every choice of a request: each prompt `n` times, in order.

    Raises:
        GenerationRequestError: There is no prompt, there are too many choices, or a parameter is
            out of range.
        ConfigError: As well.
    """
    prompts = _prompts(request, policy)
    num_choices = 1 if request.n is None else request.n
    if num_choices < 1 or num_choices * len(prompts) > MAX_CHOICES:
        raise GenerationRequestError(
            f"n={num_choices} for {len(prompts)} prompts: 1 to {MAX_CHOICES} choices in all",
            param="n",
        )
    limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    sampling = request.sampling(limit, "max_tokens")
    return [
        _Job(prompt, choice_sampling(sampling, index))
        for prompt in prompts
        for index in range(num_choices)
    ]


def _prompts(request: CompletionRequest, policy: Policy) -> list[list[int]]:
    given = request.prompt
    if isinstance(given, str):
        return [_encoded(given, request, policy)]
    if not given:
        raise GenerationRequestError("prompt is empty; give a text or token ids", param="prompt")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [ids]
    prompts = []
    for place, item in enumerate(given):
        if isinstance(item, int):
            raise GenerationRequestError(
                f"prompt[{place}] is a token id beside whole prompts; give a list of ids for one "
                "prompt, or a list of prompts",
                param="prompt",
            )
        prompts.append(_encoded(item, request, policy) if isinstance(item, str) else item)
    return prompts


def _encoded(text: str, request: CompletionRequest, policy: Policy) -> list[int]:
    return policy.chat.encode(text, add_special_tokens=request.add_special_tokens is not False)


class _Text:
    """Token ids to text, as the request wants it."""

    def __init__(self, request: CompletionRequest, policy: Policy) -> None:
        self._chat = policy.chat
        self._shows_special = request.skip_special_tokens is False
        self._keeps_stop = bool(request.include_stop_str_in_output)

    def decode(self, token_ids: Sequence[int]) -> str:
        if not self._shows_special:
            return self._chat.decode(token_ids)
        text: str = self._chat.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def stream(self, sampling: SamplingParams) -> TextStream:
        return TextStream(self, () if self._keeps_stop else sampling.stop)

    def whole(self, generated: Generated) -> str:
        text = self.decode(generated.token_ids)
        if isinstance(generated.stop_reason, str) and not self._keeps_stop:
            return text.partition(generated.stop_reason)[0]
        return text


class _Stream:
    """A streamed choice: its text, and where its next token begins there."""

    def __init__(self, text: TextStream) -> None:
        self.text = text
        self.offset = 0


class Completions:
    """One request and its answer.

    Args:
        policy: Samples.
        request: Checked.
        ledger: Of the rollout that the call belongs to; None: of none.

    Raises:
        GenerationRequestError: See :func:`check_request` and :func:`jobs_of`.
        ConfigError: As well.
    """

    def __init__(
        self, policy: Policy, request: CompletionRequest, ledger: RolloutLedger | None
    ) -> None:
        check_request(request)
        self.jobs = jobs_of(request, policy)
        self._policy = policy
        self._request = request
        self._ledger = ledger
        self._text = _Text(request, policy)
        self._envelope = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": policy.model_name,
        }

    async def sample(self, index: int, on_token: TokenCallback | None = None) -> Generated:
        """Sample one choice.

        Args:
            index: Which one.
            on_token: Told of every token.

        Raises:
            GymrlError: As :meth:`gymrl.generation.policy.Policy.sample`.
        """
        job = self.jobs[index]
        return await self._policy.complete(job.prompt_ids, job.sampling, self._ledger, on_token)

    def answer(self, samples: Sequence[Generated]) -> dict[str, Any]:
        """The answer's JSON object, of all choices' samples in order."""
        choices = []
        for index, generated in enumerate(samples):
            choice = {
                "index": index,
                "text": self._text.whole(generated),
                "logprobs": self._logprobs(generated.token_ids, generated.logprobs),
                "finish_reason": generated.finish_reason,
                "stop_reason": generated.stop_reason,
            }
            if self._request.return_token_ids is not False:
                choice["prompt_token_ids"] = self.jobs[index].prompt_ids
                choice["token_ids"] = generated.token_ids
                choice["weight_versions"] = _spans(generated)
            choices.append(choice)
        return self._envelope | {
            "choices": choices,
            "system_fingerprint": None,
            "usage": self._usage(samples),
        }

    def _usage(self, samples: Sequence[Generated]) -> dict[str, Any]:
        num_choices = self._request.n or 1
        num_prompt = sum(len(job.prompt_ids) for job in self.jobs[::num_choices])
        num_sampled = sum(len(generated.token_ids) for generated in samples)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float], offset: int = 0
    ) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        tokens, offsets = [], []
        for token_id in token_ids:
            text = self._shown(token_id)
            offsets.append(offset)
            offset += len(text)
            as_id = self._request.return_tokens_as_token_ids
            tokens.append(f"token_id:{token_id}" if as_id else text)
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "text_offset": offsets,
            "top_logprobs": None,
        }

    def _shown(self, token_id: int) -> str:
        text: str = self._policy.chat.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    async def write(self, stream: Events) -> None:
        """Sample every choice and write its chunks; cancelling ends the generations.

        An error after the first chunk is sent as an event of its own, as there is no status left
        to tell it with.
        """
        texts = [_Stream(self._text.stream(job.sampling)) for job in self.jobs]
        options = self._request.stream_options
        chunks = Chunks(
            envelope=self._envelope,
            num_choices=len(self.jobs),
            sample=self.sample,
            opening=self._opening,
            token=lambda index, token_id, logprob: self._token(
                texts[index], index, token_id, logprob
            ),
            last=lambda index, generated: self._last(texts[index], index, generated),
            usage=self._usage if options is not None and options.include_usage else None,
        )
        await write_chunks(stream, chunks)

    def _opening(self, index: int) -> dict[str, Any]:
        ids = {"prompt_token_ids": self.jobs[index].prompt_ids}
        return {"choices": [self._chunk(index, "", ids)]}

    def _token(self, stream: _Stream, index: int, token_id: int, logprob: float) -> dict[str, Any]:
        piece = stream.text.push(token_id)
        logprobs = self._logprobs([token_id], [logprob], stream.offset)
        if logprobs is not None:
            stream.offset += len(self._shown(token_id))
        return self._chunk(index, piece, {"token_ids": [token_id]}, logprobs=logprobs)

    def _last(self, stream: _Stream, index: int, generated: Generated) -> dict[str, Any]:
        return self._chunk(
            index,
            stream.text.finish(self._text.whole(generated)),
            {"token_ids": [], "weight_versions": _spans(generated)},
            finish_reason=generated.finish_reason,
            stop_reason=generated.stop_reason,
        )

    def _chunk(self, index: int, text: str, ids: dict[str, Any], **more: Any) -> dict[str, Any]:
        shown = ids if self._request.return_token_ids is not False else {}
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            **shown,
            **more,
        }


def _spans(generated: Generated) -> list[dict[str, Any]]:
    return [span._asdict() for span in generated.weight_versions]
