"""The length rules applied to one group.

All additive rules look at the reward before any of them, so their order among each other changes
nothing. Their sum is clamped at 0 from below; then bands scale what is left. Each step that
changes a reward is an entry of its ledger, named ``length_penalty/<setting>``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from gymrl.errors import ConfigError
from gymrl.scoring.length_penalty import rules as arithmetic
from gymrl.scoring.length_penalty.config import CHANNELS, Channel, LengthPenaltyConfig, LengthRules
from gymrl.scoring.length_penalty.lengths import Lengths, output_lengths
from gymrl.scoring.length_penalty.profile import (
    GateDecision,
    LengthProfile,
    gate_decision,
    read_profile,
)
from gymrl.scoring.stats import GroupStats
from gymrl.types import Reward, Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gymrl.scoring.answer import Answer, RowBody

PREFIX = "length_penalty/"
CLAMP = f"{PREFIX}clamp"

LengthStep = tuple[str, list[float]]
"""A setting, and what its rule adds to each rollout."""


class ScoringWarning(msgspec.Struct, frozen=True):
    """Something a user should hear once. Equal warnings are the same warning: log each one once.

    Attributes:
        agent: Whose groups it concerns.
        message: What happened and what to do.
    """

    agent: str
    message: str


class LengthReport(msgspec.Struct, frozen=True):
    """What the rules did to one group, for the verbose log.

    Attributes:
        agent: The group's agent.
        skipped: Why the group was left alone; None: it was not.
        gate: The gate's decision.
        lengths: Of each rollout, in row order.
        steps: What each setting added to each rollout, before the clamp and the bands.
        before: Rewards handed to the rules.
        after: Rewards they gave back.
    """

    agent: str
    skipped: Literal["disabled", "non_binary"] | None
    gate: GateDecision | None = None
    lengths: tuple[Lengths, ...] = ()
    steps: tuple[LengthStep, ...] = ()
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()

    def lines(self) -> list[str]:
        """The report as text, one line for the group and one for each rollout."""
        if self.skipped:
            return [f"length_penalty agent={self.agent} skipped: {self.skipped}"]
        head = f"length_penalty agent={self.agent}"
        if self.gate is not None and self.gate.reason != "disabled":
            head += (
                f" gate={'open' if self.gate.open else 'closed'} reason={self.gate.reason}"
                f" mean={self.gate.mean} limit={self.gate.limit}"
            )
        found = [head]
        for index, length in enumerate(self.lengths):
            spoken = " ".join(
                f"{name}={deltas[index]:+.4f}" for name, deltas in self.steps if deltas[index]
            )
            found.append(
                f"  [{index}] reasoning={length.reasoning} answer={length.answer}"
                f" reward={self.before[index]:.4f} -> {self.after[index]:.4f} {spoken}".rstrip()
            )
        return found


class LengthOutcome(msgspec.Struct, frozen=True):
    """A group after the length rules.

    Attributes:
        trajectories: In row order, with what the rules did in their ledgers.
        stats: The ``length_penalty/*`` metrics: means over rollouts.
        warnings: Each to be logged once.
        report: What happened, when the configuration is verbose.
    """

    trajectories: tuple[Trajectory, ...]
    stats: GroupStats = GroupStats()
    warnings: tuple[ScoringWarning, ...] = ()
    report: LengthReport | None = None


def env_reward(reward: Reward) -> float:
    """The reward handed to the length rules: the total before the first of their entries."""
    total = reward.verifier
    for entry in reward.adjustments:
        if entry.rule.startswith(PREFIX):
            break
        total = entry.value
    return total


def apply_length_penalty(
    config: LengthPenaltyConfig,
    trajectories: Sequence[Trajectory],
    answers: Sequence[Answer],
    row: RowBody,
    count_tokens: Callable[[str], int] | None,
) -> LengthOutcome:
    """Apply the rules to the trajectories of one prompt.

    Args:
        config: The block.
        trajectories: In row order, failures left out: they are no attempts to compare with.
        answers: The views over their results, in the same order.
        row: One of the prompt's rows, for its length profile.
        count_tokens: Tokens of a text; needed where lengths are in tokens.

    Raises:
        ConfigError: The agent's lengths are in tokens and `count_tokens` is None.
    """
    if not trajectories:
        return LengthOutcome(())
    agent = trajectories[0].agent
    rules = config.rules_for(agent)
    skipped = _skip_reason(rules, trajectories)
    if skipped is not None:
        return LengthOutcome(
            tuple(trajectories),
            _stats(trajectories, skipped_non_binary=skipped == "non_binary"),
            (_non_binary_warning(agent),) if skipped == "non_binary" else (),
            LengthReport(agent, skipped) if config.verbose else None,
        )
    scores = [trajectory.reward.total for trajectory in trajectories]
    lengths = [output_lengths(answer, _count_of(rules, count_tokens)) for answer in answers]
    profile = read_profile(row, config.default_bands())
    gate = gate_decision(rules, profile, lengths, scores)
    steps = additive_steps(rules, lengths, scores, profile, gate)
    adjusted = tuple(
        msgspec.structs.replace(
            trajectory,
            reward=_adjusted(
                trajectory.reward,
                [(name, deltas[index]) for name, deltas in steps],
                _multipliers(rules, config, profile, lengths[index]),
            ),
        )
        for index, trajectory in enumerate(trajectories)
    )
    return LengthOutcome(
        adjusted,
        _stats(adjusted, skipped_non_binary=False),
        tuple(ScoringWarning(agent, problem) for problem in profile.problems),
        LengthReport(
            agent,
            None,
            gate,
            tuple(lengths),
            tuple(steps),
            tuple(scores),
            tuple(trajectory.reward.total for trajectory in adjusted),
        )
        if config.verbose
        else None,
    )


def _count_of(
    rules: LengthRules, count_tokens: Callable[[str], int] | None
) -> Callable[[str], int]:
    if rules.length_type == "chars":
        return len
    if count_tokens is None:
        raise ConfigError(
            "length_type='tokens': lengths in tokens need a tokenizer; give one, or count 'chars'",
            setting="length_type",
        )
    return count_tokens


def additive_steps(
    rules: LengthRules,
    lengths: Sequence[Lengths],
    scores: Sequence[float],
    profile: LengthProfile,
    gate: GateDecision,
) -> list[LengthStep]:
    """What each rule that is on adds to each rollout, in the order of the ledger."""
    steps: list[LengthStep] = []
    totals = [length.total for length in lengths]
    for channel in CHANNELS:
        steps += _channel_steps(rules, channel, [length.of(channel) for length in lengths], scores)
        weight = rules.amount("group_{}_length_penalty_coeff", channel)
        if gate.open and weight:
            steps.append(
                (
                    f"group_{channel}_length_penalty_coeff",
                    arithmetic.relative_scaling(
                        [length.of(channel) for length in lengths], scores, weight
                    ),
                )
            )
    if rules.profiled_length_penalty:
        threshold = arithmetic.profiled_threshold(
            profile.passing, rules.profiled_length_n_std, rules.profiled_length_min_samples
        )
        steps.append(
            (
                "profiled_length_penalty",
                arithmetic.profiled_penalty(
                    totals, scores, threshold, rules.profiled_length_penalty
                ),
            )
        )
    if rules.pass_rate_length_penalty_weight:
        steps.append(
            (
                "pass_rate_length_penalty_weight",
                arithmetic.pass_rate_penalty(totals, scores, rules.pass_rate_length_penalty_weight),
            )
        )
    return steps


def _channel_steps(
    rules: LengthRules, channel: Channel, lengths: Sequence[int], scores: Sequence[float]
) -> list[LengthStep]:
    steps: list[LengthStep] = []
    bonus = rules.amount("{}_bonus", channel)
    if bonus:
        steps.append(
            (
                f"{channel}_bonus",
                arithmetic.shortest_bonus(lengths, scores, bonus, rules.top_percentile),
            )
        )
    longest = rules.amount("longest_{}_penalty", channel)
    if longest:
        steps.append(
            (
                f"longest_{channel}_penalty",
                arithmetic.longest_penalty(lengths, scores, longest, rules.top_percentile),
            )
        )
    outlier = rules.amount("{}_zmad_penalty", channel)
    threshold = rules.amount("{}_zmad_threshold", channel)
    if outlier and threshold > 0:
        steps.append(
            (
                f"{channel}_zmad_penalty",
                arithmetic.zmad_penalty(lengths, scores, threshold, outlier),
            )
        )
    return steps


def _multipliers(
    rules: LengthRules, config: LengthPenaltyConfig, profile: LengthProfile, lengths: Lengths
) -> list[tuple[str, float]]:
    defaults = config.default_bands()
    found = []
    for channel in CHANNELS:
        switch: bool | None = getattr(rules, f"profile_band_{channel}")
        on = channel in defaults if switch is None else switch
        band = profile.band(channel) if on else None
        if band is not None:
            found.append(
                (
                    f"profile_band_{channel}",
                    arithmetic.band_multiplier(lengths.of(channel), band),
                )
            )
    return found


def _adjusted(
    reward: Reward, deltas: list[tuple[str, float]], multipliers: list[tuple[str, float]]
) -> Reward:
    """The ledger after the rules; a rule that changed nothing leaves no entry."""
    before = reward.total
    if before <= 0:
        return reward
    total = before
    for name, delta in deltas:
        if delta:
            total += delta
            reward = reward.adjusted(PREFIX + name, total)
    if total < 0:
        total = 0.0
        reward = reward.adjusted(CLAMP, total)
    for name, multiplier in multipliers:
        if multiplier != 1.0 and total:
            total *= multiplier
            reward = reward.adjusted(PREFIX + name, total)
    return reward


def _skip_reason(
    rules: LengthRules, trajectories: Sequence[Trajectory]
) -> Literal["disabled", "non_binary"] | None:
    if not rules.enabled:
        return "disabled"
    binary = all(
        trajectory.reward.total in (0.0, 1.0) and not trajectory.reward.components
        for trajectory in trajectories
    )
    return None if binary else "non_binary"


def _non_binary_warning(agent: str) -> ScoringWarning:
    return ScoringWarning(
        agent,
        f"the length penalty is for rewards of 0 or 1 without components; agent {agent!r} gave "
        f"others, and its groups of that kind are left as they are. Set "
        f"length_penalty.agent_overrides.{agent}.enabled to false if that is meant",
    )


def _stats(trajectories: Sequence[Trajectory], *, skipped_non_binary: bool) -> GroupStats:
    pairs = [(env_reward(t.reward), t.reward.total) for t in trajectories]
    return GroupStats(
        means={
            "length_penalty/env_reward_mean": tuple(before for before, _ in pairs),
            "length_penalty/reward_delta_mean": tuple(after - before for before, after in pairs),
            "length_penalty/wiped_correct_frac": tuple(
                float(before > 0 and after <= 0) for before, after in pairs
            ),
            "length_penalty/adjusted_frac": tuple(
                float(after != before) for before, after in pairs
            ),
            "length_penalty/skipped_non_binary_frac": tuple(
                float(skipped_non_binary) for _ in pairs
            ),
        }
    )
