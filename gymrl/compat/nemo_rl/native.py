"""Native rollouts under NeMo RL's names, over :mod:`gymrl.rollout.native`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import torch

from gymrl.compat.nemo_rl.media import has_image_processor, pack_media
from gymrl.compat.nemo_rl.native_media import (
    PolicyMedia,
    batch_processor,
    has_images,
    image_format_of,
    keep_prompt_media,
    prompt_media,
)
from gymrl.compat.nemo_rl.policies import generator_of, policy_sampling
from gymrl.compat.nemo_rl.results import (
    RolloutGroupResult,
    pad_token_of,
    with_loss_multiplier,
)
from gymrl.concurrency import refuse_running_loop
from gymrl.errors import RowValueError
from gymrl.rollout.native import NativeConfig, NativePrompt, NativeRollout, run_native_rollout
from gymrl.rollout.native_text import RawText
from gymrl.rollout.prepare import check_count
from gymrl.scoring.native_metrics import native_group_stats, native_histograms, native_scalars
from gymrl.tensors import to_batch
from gymrl.types import RolloutGroup

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from gymrl.compat.nemo_rl.settings import TokenizerType
    from gymrl.rollout.native_rows import Scheduler


def run_multi_turn_rollout(
    policy_generation: Any,
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerType,
    task_to_env: Mapping[str, Any],
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    deduplicate_multimodal_data: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Play every sample to its end, all in lock-step. Blocks.

    Args:
        policy_generation: A generator of gymrl's, a
            :class:`~gymrl.generation.batch.BatchGenerator`, or anything with its batch face:
            ``generate(data, greedy=...)`` and, for rollouts at each sample's own pace,
            ``generate_async``. Sampling is its own: a batch generator's, or its ``cfg``'s
            (``temperature``, ``top_p``, ``top_k``, ``max_new_tokens``, ``stop_strings``).
        input_batch: ``message_log`` (with ``token_ids``), ``task_name``, ``extra_env_info``, and
            where they are there ``stop_strings`` and ``loss_multiplier``. Not changed. Images of
            a prompt are those of ``vllm_images``, or of its messages' parts; ``token_ids`` hold the
            region of each.
        tokenizer: Observations are encoded as they are, without a chat template. Where there are
            images: the model's processor.
        task_to_env: Environments by task name.
        max_seq_len: Tokens of a sample, prompts and answers together.
        max_rollout_turns: Generations of a sample.
        greedy: Take the likeliest token always.
        deduplicate_multimodal_data: A policy whose backend is vLLM is given vLLM-ready media alone.
            Generators of gymrl's are given images, and no other media, in any case.

    Returns:
        The input's columns with those of :class:`gymrl.tensors.RolloutBatch` over them, and
        metrics over the batch. User messages with images have policy-ready media
        (:class:`~gymrl.compat.nemo_rl.PackedTensor`), those of a prompt as they came.

    Raises:
        RuntimeError: An event loop runs in this thread.
        RolloutFailure: A sample failed for good; a `RuntimeError`.
        RowTypeError, RowValueError: The batch can't be used; nothing ran.
        UnsupportedOptionError: There are images, and `tokenizer` is no processor that can be used,
            or a prompt has policy-ready media alone.
    """
    refuse_running_loop("run_async_multi_turn_rollout_groups")
    rollout = _play(
        policy_generation,
        input_batch,
        tokenizer,
        task_to_env,
        _config(policy_generation, max_seq_len, max_rollout_turns, greedy, "batched"),
        deduplicates=deduplicate_multimodal_data,
    )
    return _whole_batch(asyncio.run(rollout), input_batch, tokenizer)


def run_async_multi_turn_rollout(
    policy_generation: Any,
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerType,
    task_to_env: Mapping[str, Any],
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    deduplicate_multimodal_data: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """As :func:`run_multi_turn_rollout`, each sample at its own pace. Blocks."""
    refuse_running_loop("run_async_multi_turn_rollout_groups")
    rollout = _play(
        policy_generation,
        input_batch,
        tokenizer,
        task_to_env,
        _config(policy_generation, max_seq_len, max_rollout_turns, greedy, "async"),
        deduplicates=deduplicate_multimodal_data,
    )
    return _whole_batch(asyncio.run(rollout), input_batch, tokenizer)


async def run_async_multi_turn_rollout_groups(
    policy_generation: Any,
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerType,
    task_to_env: Mapping[str, Any],
    max_seq_len: int,
    num_generations: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    deduplicate_multimodal_data: bool = False,
) -> AsyncGenerator[RolloutGroupResult, None]:
    """Play the whole batch, then yield its groups in input order, each with metrics of its own.

    :func:`gymrl.rollout.native.stream_native_rollout` has no such barrier.

    Args:
        policy_generation: As for :func:`run_multi_turn_rollout`, like all that is not named here.
        input_batch: The attempts at each prompt are contiguous.
        tokenizer: As there.
        task_to_env: As there.
        max_seq_len: As there.
        num_generations: Samples of one group.
        max_rollout_turns: As there.
        greedy: As there.
        deduplicate_multimodal_data: As there.

    Raises:
        RowValueError: `num_generations` is not positive or does not divide the batch; a
            `ValueError`.
        RolloutFailure: A sample failed for good; a `RuntimeError`.
    """
    check_count("num_generations", num_generations)
    size = len(input_batch["message_log"])
    if size % num_generations:
        raise RowValueError(f"num_generations={num_generations} does not divide {size} samples")
    rollout = await _play(
        policy_generation,
        input_batch,
        tokenizer,
        task_to_env,
        _config(policy_generation, max_seq_len, max_rollout_turns, greedy, "async"),
        deduplicates=deduplicate_multimodal_data,
    )
    for index, start in enumerate(range(0, size, num_generations)):
        rows = list(range(start, start + num_generations))
        group = _joined(rollout.groups[start : start + num_generations], index)
        stats = native_group_stats(group)
        yield RolloutGroupResult(
            group_index=index,
            final_batch=_columns([group], input_batch, rows, tokenizer),
            rollout_metrics={**native_scalars(stats), **native_histograms(stats)},
            task_index=index,
        )


async def run_sample_multi_turn_rollout(
    sample_idx: int,
    initial_sample_state: Mapping[str, Any],
    policy_generation: Any,
    tokenizer: TokenizerType,
    task_to_env: Mapping[str, Any],
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    deduplicate_multimodal_data: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Play one sample to its end.

    Args:
        sample_idx: Its place in the batch; becomes the state's ``idx`` where it has none.
        initial_sample_state: One entry of each column that :func:`run_multi_turn_rollout` takes.
        policy_generation: As there, like all that is not named here.
        tokenizer: As there.
        task_to_env: As there.
        max_seq_len: As there.
        max_rollout_turns: As there.
        greedy: As there.
        deduplicate_multimodal_data: As there.

    Returns:
        The state with the episode's columns over it, and metrics of this sample alone.
    """
    batch = {name: [value] for name, value in {"idx": sample_idx, **initial_sample_state}.items()}
    config = _config(policy_generation, max_seq_len, max_rollout_turns, greedy, "async")
    rollout = await _play(
        policy_generation,
        batch,
        tokenizer,
        task_to_env,
        config,
        deduplicates=deduplicate_multimodal_data,
    )
    columns, metrics = _whole_batch(rollout, batch, tokenizer)
    return {name: column[0] for name, column in columns.items()}, metrics


def _config(
    policy_generation: Any,
    max_seq_len: int,
    max_rollout_turns: int,
    greedy: bool,
    scheduler: Scheduler,
) -> NativeConfig:
    return NativeConfig(
        scheduler=scheduler,
        max_seq_len=max_seq_len,
        max_turns=max_rollout_turns,
        sampling=policy_sampling(policy_generation),
        greedy=greedy,
    )


async def _play(
    policy_generation: Any,
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerType,
    task_to_env: Mapping[str, Any],
    config: NativeConfig,
    *,
    deduplicates: bool,
) -> NativeRollout:
    # Pictures are encoded and processors tried out, which takes its time.
    prompts = await anyio.to_thread.run_sync(_prompts, input_batch, config)
    has_any = any(map(has_images, prompts))
    images = await anyio.to_thread.run_sync(partial(image_format_of, tokenizer, is_needed=has_any))
    media = None if images is None else PolicyMedia(tokenizer, deduplicates=deduplicates)
    inner = tokenizer.tokenizer if has_image_processor(tokenizer) else tokenizer
    return await run_native_rollout(
        prompts,
        generator_of(policy_generation, pad_token_of(tokenizer), media),
        task_to_env,
        codec=RawText(inner, images=images),
        config=config,
    )


def _prompts(input_batch: Mapping[str, Any], config: NativeConfig) -> list[NativePrompt]:
    size = len(input_batch["message_log"])
    columns: dict[str, Sequence[Any]] = {}
    for name in ("message_log", "task_name", "extra_env_info", "stop_strings"):
        column = input_batch.get(name)
        columns[name] = [None] * size if column is None else column
        if len(columns[name]) != size:
            raise RowValueError(f"the batch has {len(columns[name])} {name} for {size} samples")
    shown = prompt_media(input_batch, config.media)
    return [
        NativePrompt(
            task_name=task_name,
            messages=messages,
            metadata=metadata,
            stop_strings=stop_strings,
            token_ids=[int(token) for message in log for token in message["token_ids"]],
            images=images,
        )
        for log, task_name, metadata, stop_strings, (messages, images) in zip(
            *columns.values(), shown, strict=True
        )
    ]


def _whole_batch(
    rollout: NativeRollout, input_batch: Mapping[str, Any], tokenizer: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = list(range(len(rollout.groups)))
    columns = _columns(rollout.groups, input_batch, rows, tokenizer)
    return columns, {**rollout.metrics, **rollout.histograms()}


def _columns(
    groups: Sequence[RolloutGroup], input_batch: Mapping[str, Any], rows: list[int], tokenizer: Any
) -> dict[str, Any]:
    images = batch_processor(groups, input_batch, tokenizer)
    batch = to_batch(groups, pad_token_id=pad_token_of(tokenizer), images=images)
    if images is not None:
        logs = batch.final_batch["message_log"]
        pack_media(logs, images)
        keep_prompt_media(logs, [input_batch["message_log"][row] for row in rows])
    given = {
        name: column[rows] if isinstance(column, torch.Tensor) else [column[row] for row in rows]
        for name, column in input_batch.items()
    }
    return {**given, **with_loss_multiplier(batch, input_batch, rows)}


def _joined(groups: Sequence[RolloutGroup], index: int) -> RolloutGroup:
    return RolloutGroup(
        index=index,
        task_index=index,
        rows=tuple(row for group in groups for row in group.rows),
        samples=tuple(sample for group in groups for sample in group.samples),
    )
