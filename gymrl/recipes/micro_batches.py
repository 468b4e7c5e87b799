"""A step's samples cut into forward passes of a bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.tensors import RolloutBatch


class MicroBatch:
    """Samples of one forward pass.

    Nothing is computed for what stands before the first token that counts: with `start` tokens left
    out, everything but `token_ids` and `attention`, which are ``[B, T]``, is ``[B, T - 1 - start]``
    and begins with token ``start + 1``.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        mask: torch.Tensor,
        sampled: torch.Tensor,
        advantages: torch.Tensor,
    ) -> None:
        self.token_ids = token_ids
        self.attention = (torch.arange(token_ids.shape[1]) < lengths[:, None]).long()
        counts = mask[:, 1:].any(0).nonzero()
        self.start = int(counts[0]) if len(counts) else token_ids.shape[1] - 2
        self.mask = mask[:, 1 + self.start :]
        self.sampled = sampled[:, 1 + self.start :]
        self.advantages = advantages
        self.proximal = self.sampled

    @classmethod
    def of(
        cls,
        batch: RolloutBatch,
        indices: Sequence[int],
        advantages: torch.Tensor,
        trains: torch.Tensor,
    ) -> MicroBatch:
        """Some rows of a batch, cut to the longest of them; those that don't train are masked."""
        rows = torch.tensor(indices)
        width = max(2, int(batch.lengths[rows].max()))
        return cls(
            batch.token_ids[rows, :width],
            batch.lengths[rows],
            batch.token_mask[rows, :width] & trains[rows, None],
            batch.generation_logprobs[rows, :width],
            advantages[rows],
        )

    @classmethod
    def empty(cls, pad_token_id: int) -> MicroBatch:
        """One that trains nothing, for a rank that has less than others."""
        pad = torch.full((1, 2), pad_token_id)
        off = torch.zeros(1, 2, dtype=torch.bool)
        return cls(pad, torch.tensor([2]), off, torch.zeros(1, 2), torch.zeros(1))


def token_micro_batches(lengths: torch.Tensor, max_tokens: int) -> list[list[int]]:
    """Samples in micro-batches of at most so many tokens, padding counted; a longer one is alone.

    Args:
        lengths: int ``[B]``.
        max_tokens: Of a micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda i: (int(lengths[i]), i))
    batches: list[list[int]] = []
    for index in order:
        # Ascending: this sample is the longest of its micro-batch.
        if batches and int(lengths[index]) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
