"""How old tokens are: weight updates between the one that sampled and the one that trains.

A token's age is the trainer's version at the step minus the version that the token's weight span
names (:class:`~gymrl.types.WeightVersionSpan`). A generation that an update interrupted has tokens of
two ages. Spans come from the policy server's ledger (``GymConfig.token_source`` ``both`` or
``ledger``); without them a token counts as sampled when its group was asked for, which is the oldest
that it can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from gymrl.types import RolloutGroup, Trajectory


def token_ages(trajectory: Trajectory, version: int, asked: int) -> npt.NDArray[np.int64]:
    """Updates since each sampled token.

    Args:
        trajectory: Any.
        version: Of the weights that train.
        asked: Of the weights that served when the group was asked for.

    Returns:
        Int64 ``[T]``, 0 where nothing was sampled; never negative.
    """
    versions = trajectory.token_versions()
    ages = np.maximum(0, version - np.where(versions < 0, asked, versions))
    return np.where(trajectory.token_mask(), ages, 0)


def oldest(group: RolloutGroup, version: int, asked: int) -> int:
    """The age of a group's oldest token; of the request where the group has no token."""
    masks = [trajectory.token_mask() for trajectory in group.trajectories]
    if not any(mask.any() for mask in masks):
        return max(0, version - asked)
    return max(int(token_ages(t, version, asked).max()) for t in group.trajectories)


def staleness_metrics(
    groups: Sequence[RolloutGroup], asked: Sequence[int], version: int
) -> dict[str, float]:
    """Numbers over all sampled tokens.

    ``staleness_mean`` and ``staleness_max`` in updates, ``stale_tokens_rate`` (share of tokens that
    older weights sampled) and ``versioned_tokens_rate`` (share whose version the generator said).

    Args:
        groups: Of a step.
        asked: For each the version when it was asked for.
        version: Of the weights that train.
    """
    ages: list[npt.NDArray[np.int64]] = []
    known = 0
    for group, since in zip(groups, asked, strict=True):
        for trajectory in group.trajectories:
            ages.append(token_ages(trajectory, version, since)[trajectory.token_mask()])
            known += int((trajectory.token_versions() >= 0).sum())
    every = np.concatenate(ages) if ages else np.empty(0, dtype=np.int64)
    count = max(1, len(every))
    return {
        "staleness_mean": float(every.sum()) / count,
        "staleness_max": float(every.max(initial=0)),
        "stale_tokens_rate": float((every > 0).sum()) / count,
        "versioned_tokens_rate": known / count,
    }
