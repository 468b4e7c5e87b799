"""What a rollout hands back: a batch in NeMo RL's shape, made of groups."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from gymrl.compat.nemo_rl.media import pack_media
from gymrl.errors import ConfigError
from gymrl.scoring import group_stats
from gymrl.tensors import RolloutBatch, to_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gymrl.media.processing import ImageProcessor
    from gymrl.types import RolloutGroup


@dataclasses.dataclass(kw_only=True, slots=True)
class NemoGymRolloutResult:
    """Rollouts of one prompt group, or of a whole batch.

    Attributes:
        input_ids: int64 ``[B, P]``: the first prompts, padded on the right.
        final_batch: The columns of :class:`gymrl.tensors.RolloutBatch`, a plain dictionary;
            ``loss_multiplier`` is that of the input batch, but 0 for a failed row.
        rollout_metrics: Numbers by name; ``<name>/histogram`` lists of observations; tables as
            ``<agent>/full_result`` lists of JSON where they were asked for; timings on the last
            result of a call.
        task_index: The prompt's number; None where the result holds several prompts.
        batch: gymrl's own: the same rows as padded tensors, with masks and log-probabilities.
    """

    input_ids: torch.Tensor
    final_batch: dict[str, Any]
    rollout_metrics: dict[str, Any]
    task_index: int | None
    batch: RolloutBatch


@dataclasses.dataclass(kw_only=True, slots=True)
class RolloutGroupResult:
    """Native rollouts of one prompt group.

    Attributes:
        group_index: Which group of the batch, from 0.
        final_batch: The columns of :class:`gymrl.tensors.RolloutBatch`, and those of the input
            batch that they do not replace.
        rollout_metrics: Numbers over this group alone, and ``<name>/histogram`` lists.
        task_index: The prompt's number.
    """

    group_index: int
    final_batch: dict[str, Any]
    rollout_metrics: dict[str, Any]
    task_index: int | None


def gym_result(
    group: RolloutGroup,
    input_batch: Mapping[str, Any],
    *,
    pad_token_id: int,
    max_total_tokens: int | None,
    has_length_penalty: bool,
    mask_env_flagged_samples: bool,
    log_full_result_tables: bool,
    images: ImageProcessor | None = None,
) -> NemoGymRolloutResult:
    """The result of one group; `images` makes media of its images for its user messages."""
    batch = to_batch(
        [group],
        pad_token_id=pad_token_id,
        max_total_tokens=max_total_tokens,
        mask_flagged_samples=mask_env_flagged_samples,
        with_env_reward=has_length_penalty,
        images=images,
    )
    if images is not None:
        pack_media(batch.final_batch["message_log"], images)
    stats = group_stats(
        group, max_total_tokens=max_total_tokens, with_tables=log_full_result_tables
    )
    prompts = {row.task_index for row in group.rows}
    return NemoGymRolloutResult(
        input_ids=batch.input_ids,
        final_batch=with_loss_multiplier(batch, input_batch, [row.index for row in group.rows]),
        rollout_metrics={
            **group.metrics,
            **stats.histograms(),
            **stats.table_rows(),
            **(group.timings or {}),
        },
        task_index=prompts.pop() if len(prompts) == 1 else None,
        batch=batch,
    )


def with_loss_multiplier(
    batch: RolloutBatch, input_batch: Mapping[str, Any], rows: list[int]
) -> dict[str, Any]:
    """The batch's columns with the input batch's loss multipliers on top of its own."""
    given = input_batch.get("loss_multiplier")
    if given is None:
        return batch.final_batch
    multiplier = torch.as_tensor(given, dtype=torch.float32)[rows]
    own: torch.Tensor = batch.final_batch["loss_multiplier"]
    return {**batch.final_batch, "loss_multiplier": own * multiplier}


def pad_token_of(tokenizer: Any) -> int:
    """The id that batches are padded with: the tokenizer's pad token, else its end of text.

    Raises:
        ConfigError: It has neither.
    """
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one inside
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(inner, name, None)
        if token is not None:
            return int(token)
    raise ConfigError(
        "the tokenizer has neither a pad nor an end-of-text token; set tokenizer.pad_token",
        setting="tokenizer",
    )
