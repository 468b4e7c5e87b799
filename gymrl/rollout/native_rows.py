"""Prompts of native rollouts to samples: checked, encoded and numbered before anything runs."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gymrl.config import Config, FailurePolicy, SamplingParams, require
from gymrl.environments.base import Message
from gymrl.errors import RowTypeError, RowValueError
from gymrl.rollout.encode import encode_body
from gymrl.rollout.prepare import check_count, sampling_seed
from gymrl.types import Row

if TYPE_CHECKING:
    from collections.abc import Collection

    from gymrl.rollout.native_text import TextCodec

Scheduler = Literal["async", "batched"]


class NativePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One task to attempt.

    Attributes:
        task_name: The environment that steps it.
        messages: The first messages, ``role`` and ``content`` each.
        metadata: What the environment gets with the first step: plain data, copied for every
            attempt.
        stop_strings: Texts that end the first generation, until the environment names others.
        token_ids: The first prompt's ids where they are made elsewhere; None: the codec makes
            them of the messages.
        task_index: The prompt's number; None: its place in the batch.
    """

    task_name: str
    messages: Sequence[Message]
    metadata: Any = None
    stop_strings: Sequence[str] | None = None
    token_ids: Sequence[int] | None = None
    task_index: int | None = None


class NativeConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How native episodes are run.

    Attributes:
        scheduler: ``async``: every sample at its own pace. ``batched``: all samples in lock-step,
            one batch of generations, then one step an environment.
        max_seq_len: Tokens of a sample, prompts and answers together; None: the generator's
            context, which is the limit in any case.
        max_turns: Generations of an episode; None: no limit but the tokens.
        sampling: Of every call. Its stop texts come on top of the episode's own.
        greedy: Take the likeliest token always, whatever `sampling` says of temperature.
        seed: Row seeds derive from it, the task index and the rollout index; None: unseeded.
        failure_policy: ``raise`` ends the run at the first failed row; ``mask`` keeps the failure
            in its group's place; ``drop_group`` leaves the group out and counts it.
        max_concurrency: Episodes under way at a time, of the ``async`` scheduler; None: all.
        max_infra_attempts: Attempts at a row whose failures are the fleet's, the first included;
            a row that spends them ends the run.
        max_data_attempts: Attempts at a row whose failures are its own, the first included; then
            `failure_policy` decides.
        retry_delay_s: Pause before a row that failed by the fleet's fault is tried again; it
            doubles each time, up to 30 s.
        generation_timeout_s: Deadline of one generate call; None: none.
        environment_timeout_s: Deadline of one environment step; None: none. A blocking
            environment in a thread is waited for all the same.
        max_threads: Steps of a blocking environment at a time.
        require_routed_experts: An answer without the experts that its tokens went through fails
            the row (:mod:`gymrl.routed_experts`).
    """

    scheduler: Scheduler = "async"
    max_seq_len: int | None = None
    max_turns: int | None = None
    sampling: SamplingParams = SamplingParams()
    greedy: bool = False
    seed: int | None = None
    failure_policy: FailurePolicy = "raise"
    max_concurrency: int | None = None
    max_infra_attempts: int = 5
    max_data_attempts: int = 2
    retry_delay_s: float = 0.5
    generation_timeout_s: float | None = 1800.0
    environment_timeout_s: float | None = 600.0
    max_threads: int = 1
    require_routed_experts: bool = False

    def __post_init__(self) -> None:
        for setting in (
            "max_seq_len",
            "max_turns",
            "max_concurrency",
            "generation_timeout_s",
            "environment_timeout_s",
        ):
            value = getattr(self, setting)
            require(value is None or value > 0, setting, value, "must be positive, or left out")
        for setting in ("max_infra_attempts", "max_data_attempts", "max_threads"):
            value = getattr(self, setting)
            require(value > 0, setting, value, "must be positive")
        require(self.retry_delay_s >= 0, "retry_delay_s", self.retry_delay_s, "must be 0 or more")

    @property
    def profile(self) -> SamplingParams:
        """The sampling of every call, `greedy` applied."""
        if not self.greedy:
            return self.sampling
        return msgspec.structs.replace(self.sampling, temperature=0.0, top_p=1.0, top_k=None)


class NativeSample(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to be made.

    Attributes:
        row: Its place in the batch; `row.body` is the prompt as JSON.
        prompt_ids: Ids of the first prompt.
        prompt_text: The first prompt decoded.
        seed: Of its calls, or None.
    """

    row: Row
    task_name: str
    messages: tuple[Message, ...]
    metadata: Any
    stop_strings: tuple[str, ...] | None
    prompt_ids: tuple[int, ...]
    prompt_text: str
    seed: int | None


def prepare_samples(
    prompts: Sequence[NativePrompt],
    num_generations: int,
    task_names: Collection[str],
    codec: TextCodec,
    seed: int | None = None,
) -> list[NativeSample]:
    """Each prompt as `num_generations` samples in a row. Nothing of the caller's is changed.

    Args:
        prompts: At least one.
        num_generations: Attempts at each prompt.
        task_names: Environments there are.
        codec: Encodes the first prompts, each once.
        seed: Of the run.

    Raises:
        RowTypeError: A prompt, a message or a token id has the wrong type.
        RowValueError: There is no prompt, a task name is unknown, a prompt holds no token, or a
            value can't be kept as JSON; the prompt is named by the index of its first row.
    """
    check_count("num_generations", num_generations)
    if not prompts:
        raise RowValueError("the batch is empty: give at least one prompt")
    for number, prompt in enumerate(prompts):
        _check_prompt(prompt, number * num_generations, task_names)
    run = uuid.uuid4().hex[:12]
    samples: list[NativeSample] = []
    for number, prompt in enumerate(prompts):
        samples += _attempts(prompt, number, num_generations, _encoded(prompt, codec), run, seed)
    return samples


def _check_prompt(prompt: NativePrompt, index: int, task_names: Collection[str]) -> None:
    where = f"row {index}"
    if not isinstance(prompt, NativePrompt):
        raise RowTypeError(f"{where} is a {type(prompt).__name__}, not a NativePrompt", row=index)
    if prompt.task_name not in task_names:
        known = ", ".join(sorted(task_names)) or "none"
        raise RowValueError(
            f"{where}: there is no environment {prompt.task_name!r} (known: {known})", row=index
        )
    for message in prompt.messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise RowTypeError(
                f"{where}: message {message!r:.200} needs a role and a content of text", row=index
            )


def _encoded(prompt: NativePrompt, codec: TextCodec) -> tuple[int, ...]:
    if prompt.token_ids is None:
        return tuple(codec.encode_prompt(prompt.messages))
    return tuple(int(token_id) for token_id in prompt.token_ids)


def _attempts(
    prompt: NativePrompt,
    number: int,
    count: int,
    prompt_ids: tuple[int, ...],
    run: str,
    seed: int | None,
) -> list[NativeSample]:
    first = number * count
    if not prompt_ids:
        raise RowValueError(f"row {first}: the prompt holds no token", row=first)
    task_index = number if prompt.task_index is None else prompt.task_index
    body = encode_body(
        {
            "responses_create_params": {"input": list(prompt.messages)},
            "task_name": prompt.task_name,
            "extra_env_info": prompt.metadata,
        },
        first,
    )
    text = "".join(message["content"] for message in prompt.messages)
    return [
        NativeSample(
            row=Row(
                index=first + place,
                task_index=task_index,
                rollout_index=place,
                route=prompt.task_name,
                rollout_id=f"{run}-{task_index}-{place}-{first + place}",
                body=body,
            ),
            task_name=prompt.task_name,
            messages=tuple(dict(message) for message in prompt.messages),
            metadata=prompt.metadata,
            stop_strings=None if prompt.stop_strings is None else tuple(prompt.stop_strings),
            prompt_ids=prompt_ids,
            prompt_text=text,
            seed=None if seed is None else sampling_seed(seed, task_index, place),
        )
        for place in range(count)
    ]
