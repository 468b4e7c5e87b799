"""What a finished run has to say: numbers per task source, failures by class.

Read only and pure: groups in, frozen records out. A failed row has no reward, so it is counted
beside the others and enters no mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gymrl.types import Failure, RolloutGroup, Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PASS_REWARD = 1.0
"""A row passes when its verifier's reward is at least this."""

_EQUAL_REWARDS = 1e-9
_TIMER_PREFIX = "timing/rollout/"


class SourceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the rows of one task source.

    Attributes:
        source: ``task_source`` of the rows, else the agent they named.
        prompts: Groups.
        rows: Attempts, failed ones included.
        failed: Attempts without a trajectory.
        passed: Rows whose verifier's reward is at least 1.
        mean_reward: Mean total reward of the rows that have one; None without any.
        mixed_groups: Groups whose rewards differ: only those teach a group-relative trainer.
        prompt_tokens: Tokens that prompts and tools added.
        generated_tokens: Sampled tokens.
        turns: Model calls.
        max_turns: Most model calls of a row.
        truncated: Rows whose final response was cut by a limit.
    """

    source: str
    prompts: int
    rows: int
    failed: int
    passed: int
    mean_reward: float | None
    mixed_groups: int
    prompt_tokens: int
    generated_tokens: int
    turns: int
    max_turns: int
    truncated: int

    @property
    def scored(self) -> int:
        """Rows with a reward."""
        return self.rows - self.failed

    @property
    def pass_rate(self) -> float | None:
        """Share of the scored rows that passed; None without any."""
        return self.passed / self.scored if self.scored else None


class FailureSummary(msgspec.Struct, frozen=True):
    """Failures of one class: how many, and the first of them."""

    error: str
    count: int
    example: Failure


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Attributes:
        sources: By task source, in order of first appearance.
        failures: By class, the most frequent first.
        timings: As the stream's last group carried them.
        seconds: Wall time of the rollouts, start-up left out.
    """

    sources: tuple[SourceSummary, ...]
    failures: tuple[FailureSummary, ...]
    timings: dict[str, float]
    seconds: float

    @property
    def num_failed(self) -> int:
        """Rows without a trajectory."""
        return sum(source.failed for source in self.sources)

    @property
    def num_rows(self) -> int:
        """All rows."""
        return sum(source.rows for source in self.sources)

    @property
    def generated_tokens(self) -> int:
        """Sampled tokens of all rows."""
        return sum(source.generated_tokens for source in self.sources)


class _Source(msgspec.Struct):
    task_source: str | None = None


_source_decoder = msgspec.json.Decoder(_Source)


def source_of(group: RolloutGroup) -> str:
    """The task source of a group's rows; the route where they name none."""
    row = group.rows[0]
    return _source_decoder.decode(row.body).task_source or row.route


def has_differing_rewards(group: RolloutGroup) -> bool:
    """Whether the group's trajectories got more than one reward."""
    rewards = [trajectory.reward.total for trajectory in group.trajectories]
    return bool(rewards) and max(rewards) - min(rewards) > _EQUAL_REWARDS


def _summarise_source(source: str, groups: list[RolloutGroup]) -> SourceSummary:
    done: list[Trajectory] = [t for group in groups for t in group.trajectories]
    rows = sum(len(group.samples) for group in groups)
    rewards = [trajectory.reward.total for trajectory in done]
    generated = sum(trajectory.num_generated for trajectory in done)
    return SourceSummary(
        source=source,
        prompts=len(groups),
        rows=rows,
        failed=rows - len(done),
        passed=sum(trajectory.reward.verifier >= PASS_REWARD for trajectory in done),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        mixed_groups=sum(map(has_differing_rewards, groups)),
        prompt_tokens=sum(trajectory.num_tokens for trajectory in done) - generated,
        generated_tokens=generated,
        turns=sum(len(trajectory.turns) for trajectory in done),
        max_turns=max((len(trajectory.turns) for trajectory in done), default=0),
        truncated=sum(trajectory.incomplete_reason is not None for trajectory in done),
    )


def summarise_failures(groups: Iterable[RolloutGroup]) -> tuple[FailureSummary, ...]:
    """Failures by class, the most frequent first, each with the first one as the example."""
    by_class: dict[str, list[Failure]] = {}
    for group in groups:
        for failure in group.failures:
            by_class.setdefault(failure.error, []).append(failure)
    return tuple(
        FailureSummary(error, len(failures), failures[0])
        for error, failures in sorted(by_class.items(), key=lambda item: -len(item[1]))
    )


def summarise(groups: Iterable[RolloutGroup], seconds: float = 0.0) -> RunSummary:
    """Numbers about finished groups, in whatever order they finished.

    Args:
        groups: Of one run.
        seconds: Wall time the rollouts took.
    """
    ordered = sorted(groups, key=lambda group: group.index)
    by_source: dict[str, list[RolloutGroup]] = {}
    for group in ordered:
        by_source.setdefault(source_of(group), []).append(group)
    timings = next((group.timings for group in ordered if group.timings is not None), {})
    return RunSummary(
        sources=tuple(_summarise_source(source, found) for source, found in by_source.items()),
        failures=summarise_failures(ordered),
        timings=dict(timings),
        seconds=seconds,
    )


def timing_shares(timings: Mapping[str, float]) -> dict[str, float]:
    """Each timed part as a share of the total, from 0 to 1, the largest first.

    Args:
        timings: ``timing/rollout/<part>`` in seconds, with ``total`` among them. Shares in percent
            (``*_pct``) and the parts of single shards are left out; without a total there are no
            shares.
    """
    parts = {
        name.removeprefix(_TIMER_PREFIX): value
        for name, value in timings.items()
        if name.startswith(_TIMER_PREFIX) and not name.endswith("_pct") and "/shard/" not in name
    }
    total = parts.pop("total", 0.0)
    if total <= 0:
        return {}
    shares = {name: value / total for name, value in parts.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
