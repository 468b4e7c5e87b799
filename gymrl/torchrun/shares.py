"""Whole groups shared out over the ranks, as bytes that a tensor can carry."""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from gymrl.actors.codec import ValueDecoder, ValueEncoder, raw_bytes
from gymrl.media.sharing import give_media, take_media
from gymrl.tensors import RolloutBatch, to_batch
from gymrl.torchrun.staleness import oldest
from gymrl.types import RolloutGroup, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from gymrl.media.processing import ImageProcessor

_PREFIX_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank trains on.

    Attributes:
        groups: Whole prompt groups, by their index in the call. A rank may have none where there
            are fewer groups than ranks.
        metrics: Numbers about all ranks' groups; the same on every rank.
        num_groups: Groups of all ranks.
        version: Weights that served when this was handed out.
        asked: For each group the weights that served when it was asked for.
    """

    groups: tuple[RolloutGroup, ...]
    metrics: dict[str, float]
    num_groups: int
    version: int
    asked: tuple[int, ...] = ()

    @property
    def staleness(self) -> tuple[int, ...]:
        """How many weight updates ago each group's oldest token was sampled."""
        pairs = zip(self.groups, self.asked, strict=True)
        return tuple(oldest(group, self.version, asked) for group, asked in pairs)

    def token_ages(self, batch: RolloutBatch) -> torch.Tensor:
        """Int64 ``[B, T]``: how many weight updates ago each token of the share's batch was sampled.

        0 where nothing was sampled. See :mod:`gymrl.torchrun.staleness`.

        Args:
            batch: Of :meth:`batch`.
        """
        asked = torch.tensor(self.asked)[batch.group_index][:, None]
        versions = batch.weight_versions
        ages = (self.version - torch.where(versions < 0, asked, versions)).clamp(min=0)
        return torch.where(batch.token_mask, ages, torch.zeros_like(ages))

    def batch(self, *, pad_token_id: int, images: ImageProcessor | None = None) -> RolloutBatch:
        """The share as tensors; see :func:`gymrl.tensors.to_batch`.

        Args:
            pad_token_id: As there.
            images: As there; needed where the model was shown images.

        Raises:
            RowValueError: The share is empty, or has images and `images` is None.
        """
        return to_batch(self.groups, pad_token_id=pad_token_id, images=images)


def num_tokens(group: RolloutGroup) -> int:
    """Tokens of a group's trajectories, at least one."""
    return max(1, sum(trajectory.num_tokens for trajectory in group.trajectories))


def balance(weights: Sequence[int], bins: int) -> list[list[int]]:
    """Share items out so that the heaviest bin is light: the longest first, to the lightest bin.

    The largest load is at most 4/3 of the best possible one (Graham 1969, the LPT rule).

    Args:
        weights: Positive; the result depends on them and their order alone.
        bins: How many.

    Returns:
        Indices of each bin, ascending. No bin is empty while another has two.
    """
    loads = [(0, number) for number in range(bins)]
    shares: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, number = heapq.heappop(loads)
        shares[number].append(index)
        heapq.heappush(loads, (load + weights[index], number))
    return [sorted(share) for share in shares]


class _Content(msgspec.Struct, frozen=True):
    groups: list[RolloutGroup]
    asked: list[int]
    media: dict[str, bytes] = {}


_encoder = ValueEncoder()


def encode_share(groups: list[RolloutGroup], asked: list[int]) -> npt.NDArray[np.uint8]:
    """Groups as one array of bytes: lengths, structure, then every token array as it is.

    An image is in it once, however many attempts show it.
    """
    payload = bytearray()
    thin, media = take_media(groups)
    _encoder.encode_into(_Content(thin, asked, media), payload, "share")
    start = _PREFIX_BYTES + len(payload)
    data = np.zeros(start + _encoder.region_size, np.uint8)
    data[:8] = np.frombuffer(len(payload).to_bytes(8, "little"), np.uint8)
    data[_PREFIX_BYTES:start] = np.frombuffer(payload, np.uint8)
    for offset, array in _encoder.arrays:
        begin = start + offset
        data[begin : begin + array.nbytes] = np.frombuffer(raw_bytes(array), np.uint8)
    return data


def decode_share(data: npt.NDArray[np.uint8]) -> tuple[list[RolloutGroup], list[int]]:
    """What :func:`encode_share` was given; arrays are read-only views of `data`."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    view = memoryview(data.data).toreadonly()
    decoder = ValueDecoder()
    content: _Content = decoder.decode(
        view[_PREFIX_BYTES : _PREFIX_BYTES + length],
        view[_PREFIX_BYTES + length :],
        decoder.compile(_Content),
    )
    groups = give_media(content.groups, content.media) if content.media else content.groups
    return groups, content.asked


def global_metrics(groups: Sequence[RolloutGroup], max_model_len: int | None) -> dict[str, float]:
    """Numbers about a step's groups; failed rows are counted and in no mean.

    ``reward_mean``, ``reward_std``, ``truncation_rate`` (a token limit ended it),
    ``generated_tokens_mean``, ``generated_tokens``, ``total_tokens``, ``groups``, ``samples``,
    ``failed_samples``, ``masked_samples``, ``degenerate_groups`` (all rewards the same, so nothing
    to learn), and the timings of the rollout.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    metrics = {
        "groups": float(len(groups)),
        "samples": float(len(trajectories)),
        "failed_samples": float(sum(len(group.failures) for group in groups)),
        "masked_samples": float(sum(t.mask_sample for t in trajectories)),
        "total_tokens": float(sum(t.num_tokens for t in trajectories)),
        "generated_tokens": float(sum(t.num_generated for t in trajectories)),
        "degenerate_groups": float(sum(_is_degenerate(group) for group in groups)),
    }
    if trajectories:
        rewards = [t.reward.total for t in trajectories]
        metrics |= {
            "reward_mean": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
            "truncation_rate": float(
                np.mean([_is_truncated(t, max_model_len) for t in trajectories])
            ),
            "generated_tokens_mean": metrics["generated_tokens"] / len(trajectories),
        }
    for group in groups:
        metrics |= group.timings or {}
    return metrics


def _is_degenerate(group: RolloutGroup) -> bool:
    rewards = [t.reward.total for t in group.trajectories]
    return not rewards or math.isclose(min(rewards), max(rewards))


def _is_truncated(trajectory: Trajectory, max_model_len: int | None) -> bool:
    return trajectory.incomplete_reason is not None or (
        max_model_len is not None and trajectory.num_tokens >= max_model_len
    )
