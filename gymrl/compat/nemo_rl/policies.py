"""Policies with NeMo RL's batch face as generators of gymrl's, for whole native rollouts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec
import torch

from gymrl.compat.nemo_rl.settings import model_limit, sampling_of, section
from gymrl.concurrency import closing_stream
from gymrl.errors import BadLogprobsError, GenerationError
from gymrl.generation.base import Generated, SamplingParams
from gymrl.generation.batch import BatchGenerator
from gymrl.generation.batch_spec import verify_right_padding
from gymrl.routed_experts import RouteFormatError, padded_routes, signed_routes

if TYPE_CHECKING:
    from gymrl.compat.nemo_rl.native_media import PolicyMedia
    from gymrl.generation.base import Generator, TokenCallback
    from gymrl.generation.images import PromptImages
    from gymrl.types import RoutesArray

NO_LIMIT = 1 << 31


def generator_of(
    policy_generation: Any, pad_token_id: int, media: PolicyMedia | None = None
) -> Generator:
    """What native rollouts generate with.

    Args:
        policy_generation: A generator of gymrl's, a
            :class:`~gymrl.generation.batch.BatchGenerator`, or anything else with its batch face.
        pad_token_id: What that other policy's batches are padded with.
        media: Makes their media columns; None: it is asked for text alone.
    """
    if isinstance(policy_generation, BatchGenerator):
        return policy_generation.generator
    generate = getattr(policy_generation, "generate", None)
    has_batch_face = hasattr(policy_generation, "generate_async") or (
        callable(generate) and not inspect.iscoroutinefunction(generate)
    )
    if not has_batch_face:
        found: Generator = policy_generation
        return found
    return PolicyGenerator(policy_generation, pad_token_id, media)


def policy_sampling(policy_generation: Any) -> SamplingParams:
    """How a policy samples: a batch generator's own parameters, else those of its ``cfg``."""
    if isinstance(policy_generation, BatchGenerator):
        return policy_generation.sampling
    return sampling_of(section(policy_generation, "cfg"))


class PolicyGenerator:
    """A policy with a batch face, asked for one sample at a time or for a batch.

    The batch face knows stop texts and greedy decoding; temperature, filters, seeds and the token
    limit are the policy's own. An answer that is longer than what the rollout has room for is cut
    there and counts as cut by length: what is left was sampled as if that had been the limit.

    Args:
        policy: Has ``generate_async(data, greedy=...)``, or else ``generate(data, greedy=...)``,
            which blocks and is called in a thread, one call at a time.
        pad_token_id: Of its batches.
        media: Makes the media columns of its batches; None: prompts with images are refused.
    """

    def __init__(self, policy: Any, pad_token_id: int, media: PolicyMedia | None = None) -> None:
        self._policy = policy
        self._pad_token_id = pad_token_id
        self._media = media
        self._one_call = anyio.CapacityLimiter(1)
        self._one_at_a_time = anyio.CapacityLimiter(1)

    @property
    def max_model_len(self) -> int:
        """Context in tokens, as far as the policy says."""
        return model_limit(self._policy) or NO_LIMIT

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """One sample.

        Raises:
            GenerationError: The answer is not one to this prompt.
            BadLogprobsError: It has no log-probabilities.
        """
        return await self._one(prompt_ids, None, sampling, on_token)

    async def generate_with_images(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages,
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """One sample of a prompt with images; see :meth:`generate`.

        Raises:
            GymrlError: As there.
        """
        return await self._one(prompt_ids, images, sampling, on_token)

    async def _one(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages | None,
        sampling: SamplingParams,
        on_token: TokenCallback | None,
    ) -> Generated:
        if not hasattr(self._policy, "generate_async"):
            [generated] = await self.generate_batch_with_images([prompt_ids], [images], [sampling])
            return generated
        data = await self._data([prompt_ids], [images], [sampling])
        greedy = sampling.temperature == 0
        stream = self._policy.generate_async(data, greedy=greedy)
        async with closing_stream(stream) as answers:
            outputs = [output async for _, output in answers]
        if len(outputs) != 1:
            raise GenerationError(f"the policy gave {len(outputs)} answers to one sample")
        generated = _generated(outputs[0], 0, prompt_ids, sampling)
        if on_token is not None:
            for token_id, logprob in zip(generated.token_ids, generated.logprobs, strict=True):
                on_token(token_id, logprob)
        return generated

    async def generate_batch(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]
    ) -> list[Generated]:
        """A whole batch in one call where the policy has one, else sample by sample.

        Cancelling it waits for a blocking call to end.

        Raises:
            GymrlError: As :meth:`generate`.
        """
        return await self.generate_batch_with_images(prompts, [None] * len(prompts), samplings)

    async def generate_batch_with_images(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[PromptImages | None],
        samplings: Sequence[SamplingParams],
    ) -> list[Generated]:
        """As :meth:`generate_batch`, for prompts some of which have images."""
        if not callable(getattr(self._policy, "generate", None)):
            rows = zip(prompts, images, samplings, strict=True)
            return [await self._one(*row, None) for row in rows]
        data = await self._data(prompts, images, samplings)
        greedy = all(sampling.temperature == 0 for sampling in samplings)
        output = await anyio.to_thread.run_sync(
            self._blocking, data, greedy, limiter=self._one_call
        )
        if len(output["unpadded_sequence_lengths"]) != len(prompts):
            raise GenerationError(
                f"the policy gave {len(output['unpadded_sequence_lengths'])} answers to "
                f"{len(prompts)} samples"
            )
        verify_right_padding(output, self._pad_token_id)
        return [
            _generated(output, row, prompt, sampling)
            for row, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]

    async def _data(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[PromptImages | None],
        samplings: Sequence[SamplingParams],
    ) -> dict[str, Any]:
        data = _batch(prompts, samplings, self._pad_token_id)
        if not any(images):
            return data
        if self._media is None:
            raise GenerationError("the prompts show images, and this policy is asked for text")
        add = self._media.add
        # Processors are no thing for two threads.
        await anyio.to_thread.run_sync(
            add, data, prompts, images, self._policy, limiter=self._one_at_a_time
        )
        return data

    def _blocking(self, data: Mapping[str, Any], greedy: bool) -> Any:
        return self._policy.generate(data, greedy=greedy)

    async def close(self) -> None:
        """Nothing: the policy is the caller's."""


def _batch(
    prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], pad_token_id: int
) -> dict[str, Any]:
    width = max(len(prompt) for prompt in prompts)
    return {
        "input_ids": torch.tensor(
            [[*prompt, *[pad_token_id] * (width - len(prompt))] for prompt in prompts]
        ),
        "input_lengths": torch.tensor([len(prompt) for prompt in prompts]),
        "stop_strings": [list(sampling.stop) or None for sampling in samplings],
    }


def _routes(output: Mapping[str, Any], row: int, start: int, end: int) -> RoutesArray | None:
    """The routes of one row, where the policy gives any."""
    given = output.get("routed_experts")
    if given is None:
        return None
    try:
        routes = signed_routes(given[row].detach().cpu().numpy())
        return padded_routes(routes, start, end - start)
    except RouteFormatError as error:
        raise GenerationError(f"routed_experts of row {row} of the policy: {error}") from error


def _generated(
    output: Mapping[str, Any], row: int, prompt_ids: Sequence[int], sampling: SamplingParams
) -> Generated:
    """One row of an answer, held to its prompt and cut to its limit."""
    start, end = len(prompt_ids), int(output["unpadded_sequence_lengths"][row])
    ids = [int(token) for token in output["output_ids"][row][:end]]
    if len(ids) != end or ids[:start] != list(prompt_ids):
        raise GenerationError(
            f"the policy's answer of {len(ids)} ids (it says {end}) does not begin with the "
            f"prompt of {start} tokens"
        )
    logprobs = output.get("logprobs")
    if logprobs is None:
        raise BadLogprobsError("the policy's answer has no logprobs, which training needs")
    is_cut = bool(output["truncated"][row]) if output.get("truncated") is not None else False
    generated = Generated(
        token_ids=ids[start:],
        logprobs=[float(value) for value in logprobs[row][start:end]],
        finish_reason="length" if is_cut else "stop",
        routed_experts=_routes(output, row, start, end),
    )
    limit = sampling.max_tokens
    if limit is None or len(generated.token_ids) <= limit:
        return generated
    routes = generated.routed_experts
    return msgspec.structs.replace(
        generated,
        token_ids=generated.token_ids[:limit],
        logprobs=generated.logprobs[:limit],
        finish_reason="length",
        routed_experts=None if routes is None else routes[: start + limit],
    )
