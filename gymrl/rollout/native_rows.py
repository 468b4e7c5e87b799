"""Prompts of native rollouts to samples: checked, encoded and numbered before anything runs."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gymrl.config import Config, FailurePolicy, MediaConfig, SamplingParams, require
from gymrl.environments.base import Message
from gymrl.errors import MediaError, RowTypeError, RowValueError
from gymrl.media.parts import content_problem, content_sources, content_text, copied
from gymrl.rollout.encode import encode_body
from gymrl.rollout.native_images import (
    PromptImagesRead,
    PromptSegment,
    format_of,
    image_part,
    lifted,
    recorded_message,
)
from gymrl.rollout.prepare import check_count, sampling_seed
from gymrl.types import Row

if TYPE_CHECKING:
    from collections.abc import Collection

    from gymrl.media import EncodedImage
    from gymrl.rollout.native_text import TextCodec

Scheduler = Literal["async", "batched"]


class NativePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One task to attempt.

    Attributes:
        task_name: The environment that steps it.
        messages: The first messages, ``role`` and ``content`` each: texts, or parts of text and
            images (:data:`gymrl.environments.base.Message`).
        metadata: What the environment gets with the first step: plain data, copied for every
            attempt.
        stop_strings: Texts that end the first generation, until the environment names others.
        token_ids: The first prompt's ids where they are made elsewhere; None: the codec makes
            them of the messages. They hold the regions of the images.
        images: With `token_ids` alone: the sources of the images that these show, in order, where
            the messages have no parts for them. None: those of the messages.
        task_index: The prompt's number; None: its place in the batch.
    """

    task_name: str
    messages: Sequence[Message]
    metadata: Any = None
    stop_strings: Sequence[str] | None = None
    token_ids: Sequence[int] | None = None
    images: Sequence[str] | None = None
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
        media: Where images of prompts and observations may come from, how large and how many they
            may be. They need a codec that writes images.
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
    media: MediaConfig = MediaConfig()

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
        prompt: Tokens and images of the first prompt.
        prompt_text: The first prompt's text.
        seed: Of its calls, or None.
        error: Why the prompt can't be played; None where it can.
    """

    row: Row
    task_name: str
    messages: tuple[Message, ...]
    metadata: Any
    stop_strings: tuple[str, ...] | None
    prompt: PromptSegment
    prompt_text: str
    seed: int | None
    error: MediaError | None = None


def prepare_samples(
    prompts: Sequence[NativePrompt],
    num_generations: int,
    task_names: Collection[str],
    codec: TextCodec,
    seed: int | None = None,
    images: Sequence[PromptImagesRead] | None = None,
) -> list[NativeSample]:
    """Each prompt as `num_generations` samples in a row. Nothing of the caller's is changed.

    Args:
        prompts: At least one.
        num_generations: Attempts at each prompt.
        task_names: Environments there are.
        codec: Encodes the first prompts, each once.
        seed: Of the run.
        images: Those of each prompt; None: no prompt has any.

    Raises:
        RowTypeError: A prompt, a message or a token id has the wrong type.
        RowValueError: There is no prompt, a task name is unknown, a prompt holds no token, or a
            value can't be kept as JSON; the prompt is named by the index of its first row.
    """
    check_prompts(prompts, num_generations, task_names)
    run = uuid.uuid4().hex[:12]
    samples: list[NativeSample] = []
    for number, prompt in enumerate(prompts):
        read = PromptImagesRead() if images is None else images[number]
        first = _first_sample(prompt, number * num_generations, _encoded(prompt, codec, read), read)
        task_index = number if prompt.task_index is None else prompt.task_index
        samples += _attempts(first, task_index, num_generations, run, seed)
    return samples


def check_prompts(
    prompts: Sequence[NativePrompt], num_generations: int, task_names: Collection[str]
) -> None:
    """What can be said of prompts before their images are read.

    Raises:
        RowTypeError, RowValueError: As :func:`prepare_samples`.
    """
    check_count("num_generations", num_generations)
    if not prompts:
        raise RowValueError("the batch is empty: give at least one prompt")
    for number, prompt in enumerate(prompts):
        _check_prompt(prompt, number * num_generations, task_names)


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
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowTypeError(
                f"{where}: message {message!r:.200} needs a role and a content", row=index
            )
        problem = content_problem(message.get("content"))
        if problem is not None:
            raise RowTypeError(
                f"{where}: message {message!r:.200}: its content {problem}", row=index
            )
    if prompt.images is not None and prompt.token_ids is None:
        raise RowValueError(
            f"{where}: images are given beside the messages without the token_ids that show them; "
            "put them into the messages, as parts",
            row=index,
        )


def _encoded(
    prompt: NativePrompt, codec: TextCodec, read: PromptImagesRead
) -> PromptSegment | MediaError:
    """Tokens and images, or why there are none."""
    if read.error is not None:
        return read.error
    format = format_of(codec)
    try:
        if prompt.token_ids is None:
            ids = codec.encode_prompt(prompt.messages)
            return PromptSegment.written(ids, read.images, format)
        ids = [int(token_id) for token_id in prompt.token_ids]
        return PromptSegment.located(ids, read.images, format)
    except MediaError as error:
        return MediaError(f"the prompt: {error.message}", **error.fields)


def _first_sample(
    prompt: NativePrompt,
    index: int,
    encoded: PromptSegment | MediaError,
    read: PromptImagesRead,
) -> NativeSample:
    """The first attempt, to be numbered."""
    error = encoded if isinstance(encoded, MediaError) else None
    segment = PromptSegment([]) if isinstance(encoded, MediaError) else encoded
    if error is None and not segment.token_ids:
        raise RowValueError(f"row {index}: the prompt holds no token", row=index)
    images = [image.encoded for image in read.images]
    body = encode_body(
        {
            "responses_create_params": {"input": _recorded(prompt, images)},
            "task_name": prompt.task_name,
            "extra_env_info": prompt.metadata,
        },
        index,
    )
    body, media = lifted(body, images)
    return NativeSample(
        row=Row(
            index=index,
            task_index=0,
            rollout_index=0,
            route=prompt.task_name,
            rollout_id="",
            body=body,
            media=media,
        ),
        task_name=prompt.task_name,
        messages=tuple(copied(message) for message in prompt.messages),
        metadata=prompt.metadata,
        stop_strings=None if prompt.stop_strings is None else tuple(prompt.stop_strings),
        prompt=segment,
        prompt_text="".join(content_text(message["content"]) for message in prompt.messages),
        seed=None,
        error=error,
    )


def _recorded(prompt: NativePrompt, images: Sequence[EncodedImage]) -> list[Any]:
    """The messages as the row keeps them; images beside them go before the first user's text."""
    if not images:
        return list(prompt.messages)
    messages: list[Any] = []
    left = list(images)
    if prompt.images is None:
        for message in prompt.messages:
            count = len(content_sources(message["content"]))
            messages.append(recorded_message(message, left[:count]))
            del left[:count]
        return messages
    messages = [recorded_message(message, ()) for message in prompt.messages]
    messages = messages or [{"role": "user", "content": ""}]
    users = (message for message in messages if message["role"] == "user")
    target = next(users, messages[-1])
    content = target["content"]
    text = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    target["content"] = [*map(image_part, left), *text]
    return messages


def _attempts(
    first: NativeSample, task_index: int, count: int, run: str, seed: int | None
) -> list[NativeSample]:
    start = first.row.index
    return [
        msgspec.structs.replace(
            first,
            row=msgspec.structs.replace(
                first.row,
                index=start + place,
                task_index=task_index,
                rollout_index=place,
                rollout_id=f"{run}-{task_index}-{place}-{start + place}",
            ),
            seed=None if seed is None else sampling_seed(seed, task_index, place),
        )
        for place in range(count)
    ]
