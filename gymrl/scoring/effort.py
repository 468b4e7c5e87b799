"""Shaping the reward of low-effort prompts by the length of the answer.

A prompt that holds `low_string` asks for a short answer. With ``length`` tokens in it::

    length_reward = min(1, low_weight * (1 - length / low_ub))
    reward'       = reward + reward * max(length_reward, 0) + low_penalty * min(length_reward, 0)

The formula and its names are those of NeMo RL's ``EffortLevelsConfig``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from gymrl.config import Config, require
from gymrl.scoring.stats import GroupStats
from gymrl.types import Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

RULE = "effort"


class EffortConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length shaping of prompts that ask for little effort.

    Attributes:
        low_weight: Weight of the length reward; 0 (or less) switches the shaping off.
        low_penalty: Weight of a negative length reward, 0 or more.
        low_ub: Tokens at which the length reward reaches 0; above 0.
        low_string: What the last user message must hold; empty switches the shaping off.
    """

    low_weight: float = 0.0
    low_penalty: float = 1.0
    low_ub: int = 64000
    low_string: str = ""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.low_weight), "low_weight", self.low_weight, "must be a finite number"
        )
        if self.active:
            require(
                self.low_ub > 0,
                "low_ub",
                self.low_ub,
                "must be positive when low_weight and low_string are set: lengths are divided by it",
            )
            require(
                math.isfinite(self.low_penalty) and self.low_penalty >= 0,
                "low_penalty",
                self.low_penalty,
                "must be a finite number, 0 or more: a negative one would pay for length",
            )

    @property
    def active(self) -> bool:
        """Whether any reward is shaped."""
        return self.low_weight > 0 and bool(self.low_string)


class EffortOutcome(msgspec.Struct, frozen=True):
    """What shaping made of one trajectory.

    Attributes:
        trajectory: With an ``effort`` entry in its ledger where the prompt is low-effort.
        is_low: The prompt asks for little effort.
        length: Tokens of the terminal assistant message; None when it has none.
        length_reward: The length reward, where one was computed.
    """

    trajectory: Trajectory
    is_low: bool
    length: int | None
    length_reward: float | None = None


def terminal_length(trajectory: Trajectory) -> int | None:
    """Sampled tokens of the last assistant message; None when nothing was sampled there.

    An empty terminal message has no length to shape by: counting it as 0 would pay the highest
    length reward for no answer.
    """
    if trajectory.placeholder or not trajectory.turns:
        return None
    last = trajectory.turns[-1]
    return (last.end - last.generation_start) or None


def length_reward(length: int, config: EffortConfig) -> float:
    """``min(1, low_weight * (1 - length / low_ub))``."""
    return min(1.0, config.low_weight * (1.0 - length / config.low_ub))


def shaped_reward(reward: float, term: float, config: EffortConfig) -> float:
    """The reward after shaping by the length reward `term`."""
    return reward + reward * max(term, 0.0) + config.low_penalty * min(term, 0.0)


def shape_effort(trajectory: Trajectory, prompt: str, config: EffortConfig) -> EffortOutcome:
    """Shape one trajectory.

    Args:
        trajectory: Not changed.
        prompt: The text of the row's last user message.
        config: Inactive: the trajectory comes back as it is.
    """
    length = terminal_length(trajectory)
    is_low = config.active and config.low_string in prompt
    if not is_low or length is None:
        return EffortOutcome(trajectory, is_low, length)
    term = length_reward(length, config)
    reward = trajectory.reward
    return EffortOutcome(
        msgspec.structs.replace(
            trajectory, reward=reward.adjusted(RULE, shaped_reward(reward.total, term, config))
        ),
        is_low,
        length,
        term,
    )


def effort_stats(outcomes: Sequence[EffortOutcome]) -> GroupStats:
    """The effort metrics; a name with nothing to report is absent.

    ``mean_length_reward_low`` and ``mean_reward_low`` (the shaped reward) over low-effort
    trajectories, ``mean_length_low``, ``median_length_low``, ``mean_length_high`` and
    ``median_length_high`` in tokens over the low-effort ones and the others.
    """
    low = [outcome for outcome in outcomes if outcome.length_reward is not None]
    low_lengths = tuple(float(o.length) for o in low if o.length is not None)
    high_lengths = tuple(float(o.length) for o in outcomes if not o.is_low and o.length is not None)
    means = {
        "mean_length_reward_low": tuple(
            o.length_reward for o in low if o.length_reward is not None
        ),
        "mean_reward_low": tuple(o.trajectory.reward.total for o in low),
        "mean_length_low": low_lengths,
        "mean_length_high": high_lengths,
    }
    medians = {"median_length_low": low_lengths, "median_length_high": high_lengths}
    return GroupStats(
        means={name: values for name, values in means.items() if values},
        medians={name: values for name, values in medians.items() if values},
    )
