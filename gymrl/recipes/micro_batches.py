"""A step's samples cut into forward passes of a bounded size."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What is learned from, in the batch's axes: B samples, T tokens.

    Attributes:
        token_ids: int64 ``[B, T]``.
        lengths: int64 ``[B]``.
        mask: bool ``[B, T]``: tokens that count in the loss.
        sampled: float32 ``[B, T]``: the generator's log-probabilities.
        ages: int64 ``[B, T]``: weight updates since each was sampled.
        advantages: float32 ``[B]``.
    """

    token_ids: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor
    sampled: torch.Tensor
    ages: torch.Tensor
    advantages: torch.Tensor

    def at(self, indices: Sequence[int]) -> Samples:
        """Some of them, cut to the longest."""
        rows = torch.tensor(indices)
        width = int(self.lengths[rows].max())
        return Samples(
            token_ids=self.token_ids[rows, :width],
            lengths=self.lengths[rows],
            mask=self.mask[rows, :width],
            sampled=self.sampled[rows, :width],
            ages=self.ages[rows, :width],
            advantages=self.advantages[rows],
        )

    @classmethod
    def empty(cls, pad_token_id: int) -> Samples:
        """One that trains nothing, for a rank that has less than others."""
        nothing = torch.zeros(1, 2)
        return cls(
            token_ids=torch.full((1, 2), pad_token_id),
            lengths=torch.tensor([2]),
            mask=nothing.bool(),
            sampled=nothing,
            ages=nothing.long(),
            advantages=torch.zeros(1),
        )


class MicroBatch:
    """Samples of one forward pass.

    Nothing is computed for what stands before the first token that counts: with `start` tokens left
    out, everything but `token_ids` and `attention`, which are ``[B, T]``, is ``[B, T - 1 - start]``
    and begins with token ``start + 1``.

    Args:
        samples: All of them.

    Attributes:
        proximal: Log-probabilities of the weights at the start of the step, once they are known.
    """

    def __init__(self, samples: Samples) -> None:
        self.token_ids = samples.token_ids
        width = samples.token_ids.shape[1]
        self.attention = (torch.arange(width) < samples.lengths[:, None]).long()
        counts = samples.mask[:, 1:].any(0).nonzero()
        self.start = int(counts[0]) if len(counts) else width - 2
        self.mask = samples.mask[:, 1 + self.start :]
        self.sampled = samples.sampled[:, 1 + self.start :]
        self.is_stale = samples.ages[:, 1 + self.start :] > 0
        self.advantages = samples.advantages
        self.proximal = self.sampled

    def to(self, device: torch.device) -> Self:
        """Move it to where the model is."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))
        return self


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
