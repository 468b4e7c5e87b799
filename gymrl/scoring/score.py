"""The scoring of one group, in its fixed order.

verifier's reward -> effort shaping -> penalties -> [this is the `env_reward`] -> length rules ->
total. Each step appends to the reward's ledger and none overwrites, so that every value on the way
can be read afterwards. The group handed in is not changed. A failed sample passes through: it is
compared with nothing and averaged with nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from gymrl.config import Config
from gymrl.errors import ConfigError
from gymrl.scoring.answer import Answer, RowBody
from gymrl.scoring.components import check_reward_contract
from gymrl.scoring.effort import RULE as EFFORT_RULE
from gymrl.scoring.effort import EffortConfig, effort_stats, shape_effort
from gymrl.scoring.length_penalty.apply import (
    PREFIX,
    LengthOutcome,
    LengthReport,
    ScoringWarning,
    apply_length_penalty,
)
from gymrl.scoring.length_penalty.config import LengthPenaltyConfig
from gymrl.scoring.masks import masked
from gymrl.scoring.metrics import measure
from gymrl.scoring.penalties import (
    RULES as PENALTY_RULES,
)
from gymrl.scoring.penalties import (
    Penalty,
    PenaltyConfig,
    apply_penalties,
    penalty_stats,
    resolve_penalties,
)
from gymrl.scoring.stats import GroupStats
from gymrl.types import RolloutGroup, Row, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.scoring.penalties import Encode


class ScoringConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rewards are scored. Nothing is on by default but the environment's mask flags.

    Attributes:
        effort: Length shaping of low-effort prompts.
        penalties: Faults that take a reward away.
        length_penalty: Rules on length within a group; training rollouts through Gym only.
        should_mask_flagged_samples: Honor the environment's `mask_sample` flags.
        log_full_result_tables: Keep whole results as tables beside the metrics.
    """

    effort: EffortConfig | None = None
    penalties: PenaltyConfig | None = None
    length_penalty: LengthPenaltyConfig | None = None
    should_mask_flagged_samples: bool = True
    log_full_result_tables: bool = False


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration resolved once for a run (:func:`resolve_scoring`).

    Attributes:
        config: As given.
        penalties: The penalties that are on, with their token ids.
        length_penalty: The block, None where it does not apply.
        count_tokens: Tokens of a text.
        max_total_tokens: The generator's context in tokens.
    """

    config: ScoringConfig
    penalties: tuple[Penalty, ...] = ()
    length_penalty: LengthPenaltyConfig | None = None
    count_tokens: Callable[[str], int] | None = None
    max_total_tokens: int | None = None


class ScoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group after scoring, and what is known about it.

    Attributes:
        group: With ledgers, masks and metrics.
        stats: The values behind its metrics, to be merged with those of other groups.
        warnings: To be logged once each over a run (equal warnings are one).
        length_report: What the length rules did, when they are verbose.
    """

    group: RolloutGroup
    stats: GroupStats
    warnings: tuple[ScoringWarning, ...] = ()
    length_report: LengthReport | None = None


def resolve_scoring(
    config: ScoringConfig,
    encode: Encode | None = None,
    *,
    max_total_tokens: int | None = None,
    training: bool = True,
) -> Scoring:
    """Do what is done once for a run.

    Args:
        config: The configuration.
        encode: Text to token ids, without special tokens added.
        max_total_tokens: The generator's context, for truncation; None: only reasons count.
        training: False for validation, which stays without the length penalty.

    Raises:
        ConfigError: The length penalty counts tokens and there is no `encode`.
    """
    length_penalty = config.length_penalty if training else None
    if length_penalty is not None and length_penalty.needs_tokens and encode is None:
        raise ConfigError(
            "length_penalty.default.length_type='tokens' (or an override's): lengths in tokens "
            "need a tokenizer; give one, or count 'chars'",
            setting="length_type",
        )
    return Scoring(
        config=config,
        penalties=resolve_penalties(config.penalties, encode),
        length_penalty=length_penalty,
        count_tokens=None if encode is None else _counter(encode),
        max_total_tokens=max_total_tokens,
    )


def score_group(group: RolloutGroup, scoring: Scoring) -> RolloutGroup:
    """A scored copy of the group, with its metrics (:func:`score`)."""
    return score(group, scoring).group


def score(group: RolloutGroup, scoring: Scoring) -> ScoredGroup:
    """Score one group in the fixed order.

    Args:
        group: All attempts at one prompt, in row order. Not changed.
        scoring: The resolved configuration.

    Raises:
        RewardContractError: A verifier's reward is not finite, or not the sum of its components.
        GymSchemaError: A trajectory's result is no readable JSON object.
        ValueError: The group has been scored before.
    """
    run = _opened(group)
    run.trajectories = [
        _with_mask(trajectory, answer, scoring.config.should_mask_flagged_samples)
        for trajectory, answer in zip(run.trajectories, run.answers, strict=True)
    ]
    parts = [_shape(run, scoring.config.effort), _penalize(run, scoring.penalties)]
    length = _apply_lengths(run, scoring)
    parts.append(length.stats)
    scored = run.closed()
    parts.append(
        measure(
            scored,
            run.answers_by_sample(),
            max_total_tokens=scoring.max_total_tokens,
            with_tables=scoring.config.log_full_result_tables,
        )
    )
    stats = GroupStats.merged(parts)
    return ScoredGroup(
        group=msgspec.structs.replace(scored, metrics={**group.metrics, **stats.scalars()}),
        stats=stats,
        warnings=length.warnings,
        length_report=length.report,
    )


class _Run(msgspec.Struct):
    """One group on its way through the steps: its trajectories, and where they belong.

    Attributes:
        group: As it came.
        rows: The row of each trajectory.
        answers: The view over each trajectory's result.
        trajectories: As the last step left them.
    """

    group: RolloutGroup
    rows: list[Row]
    answers: list[Answer]
    trajectories: list[Trajectory]

    def closed(self) -> RolloutGroup:
        """The group with the trajectories in their samples' places."""
        scored = iter(self.trajectories)
        samples = tuple(
            next(scored) if isinstance(sample, Trajectory) else sample
            for sample in self.group.samples
        )
        return msgspec.structs.replace(self.group, samples=samples)

    def answers_by_sample(self) -> list[Answer | None]:
        """One for each sample of the group, None for a failure."""
        answers = iter(self.answers)
        return [
            next(answers) if isinstance(sample, Trajectory) else None
            for sample in self.group.samples
        ]


def _opened(group: RolloutGroup) -> _Run:
    """Check what the verifiers gave, and decode each result once."""
    run = _Run(group, [], [], [])
    for row, sample in zip(group.rows, group.samples, strict=True):
        if isinstance(sample, Trajectory):
            check_reward_contract(sample.reward, row.index, sample.agent)
            _refuse_scored(sample, row.index)
            run.rows.append(row)
            run.answers.append(Answer(sample.result))
            run.trajectories.append(sample)
    return run


def _shape(run: _Run, effort: EffortConfig | None) -> GroupStats:
    if effort is None or not effort.active:
        return GroupStats()
    outcomes = [
        shape_effort(trajectory, RowBody(row.body, row.index).last_user_text, effort)
        for row, trajectory in zip(run.rows, run.trajectories, strict=True)
    ]
    run.trajectories = [outcome.trajectory for outcome in outcomes]
    return effort_stats(outcomes)


def _penalize(run: _Run, penalties: Sequence[Penalty]) -> GroupStats:
    run.trajectories = [
        apply_penalties(trajectory, answer, penalties)
        for trajectory, answer in zip(run.trajectories, run.answers, strict=True)
    ]
    return penalty_stats(run.trajectories, penalties)


def _apply_lengths(run: _Run, scoring: Scoring) -> LengthOutcome:
    if scoring.length_penalty is None or not run.trajectories:
        return LengthOutcome(tuple(run.trajectories))
    outcome = apply_length_penalty(
        scoring.length_penalty,
        run.trajectories,
        run.answers,
        RowBody(run.rows[0].body, run.rows[0].index),
        scoring.count_tokens,
    )
    run.trajectories = list(outcome.trajectories)
    return outcome


def _counter(encode: Encode) -> Callable[[str], int]:
    def count_tokens(text: str) -> int:
        return len(encode(text))

    return count_tokens


def _with_mask(trajectory: Trajectory, answer: Answer, honor_flags: bool) -> Trajectory:
    flag = masked(trajectory, answer, honor_flags)
    if flag == trajectory.mask_sample:
        return trajectory
    return msgspec.structs.replace(trajectory, mask_sample=flag)


def _refuse_scored(trajectory: Trajectory, row: int) -> None:
    for entry in trajectory.reward.adjustments:
        if (
            entry.rule == EFFORT_RULE
            or entry.rule in PENALTY_RULES
            or entry.rule.startswith(PREFIX)
        ):
            raise ValueError(
                f"row {row} has been scored before (its ledger has {entry.rule!r}); scoring it "
                f"again would apply each rule twice"
            )
