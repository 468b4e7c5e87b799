"""What a finished run has to say: numbers per task source, failures by class.

Read only and pure: groups in, frozen records out. A failed row has no reward, so it is counted
beside the others and enters no mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gymrl.types import Failure, RolloutGroup

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
    """Failures of one class: how many, and the one of the first row."""

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
        """Rows without a trajectory, those of dropped groups included."""
        return sum(failure.count for failure in self.failures)

    @property
    def num_rows(self) -> int:
        """Rows of the groups that came."""
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


class _SourceTally(msgspec.Struct, kw_only=True):
    """Sums over the groups of one source."""

    first_group: int
    prompts: int = 0
    rows: int = 0
    failed: int = 0
    passed: int = 0
    reward_sum: float = 0.0
    mixed_groups: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    turns: int = 0
    max_turns: int = 0
    truncated: int = 0

    def add(self, group: RolloutGroup) -> None:
        self.first_group = min(self.first_group, group.index)
        self.prompts += 1
        self.rows += len(group.samples)
        self.failed += len(group.failures)
        self.mixed_groups += has_differing_rewards(group)
        for trajectory in group.trajectories:
            self.passed += trajectory.reward.verifier >= PASS_REWARD
            self.reward_sum += trajectory.reward.total
            self.tokens += trajectory.num_tokens
            self.generated_tokens += trajectory.num_generated
            self.turns += len(trajectory.turns)
            self.max_turns = max(self.max_turns, len(trajectory.turns))
            self.truncated += trajectory.incomplete_reason is not None

    def summary(self, source: str) -> SourceSummary:
        scored = self.rows - self.failed
        return SourceSummary(
            source=source,
            prompts=self.prompts,
            rows=self.rows,
            failed=self.failed,
            passed=self.passed,
            mean_reward=self.reward_sum / scored if scored else None,
            mixed_groups=self.mixed_groups,
            prompt_tokens=self.tokens - self.generated_tokens,
            generated_tokens=self.generated_tokens,
            turns=self.turns,
            max_turns=self.max_turns,
            truncated=self.truncated,
        )


class RunTally:
    """Sums over a run's groups as they finish, in any order; holds none of them."""

    def __init__(self) -> None:
        self._sources: dict[str, _SourceTally] = {}
        self._failures: dict[str, tuple[int, Failure]] = {}
        self._timings: dict[str, float] = {}

    def add(self, group: RolloutGroup) -> None:
        """Count a finished group."""
        source = source_of(group)
        if source not in self._sources:
            self._sources[source] = _SourceTally(first_group=group.index)
        self._sources[source].add(group)
        for failure in group.failures:
            self.add_failure(failure)
        if group.timings is not None:
            self._timings = dict(group.timings)

    def add_failure(self, failure: Failure) -> None:
        """Count a failed row whose group is left out, and so never comes."""
        count, example = self._failures.get(failure.error, (0, failure))
        if failure.row is not None and (example.row is None or failure.row < example.row):
            example = failure
        self._failures[failure.error] = (count + 1, example)

    def summary(self, seconds: float = 0.0) -> RunSummary:
        """The numbers so far.

        Args:
            seconds: Wall time the rollouts took.
        """
        sources = sorted(self._sources.items(), key=lambda item: item[1].first_group)
        failures = sorted(self._failures.items(), key=lambda item: -item[1][0])
        return RunSummary(
            sources=tuple(tally.summary(source) for source, tally in sources),
            failures=tuple(FailureSummary(name, *counted) for name, counted in failures),
            timings=self._timings,
            seconds=seconds,
        )


def summarise(groups: Iterable[RolloutGroup], seconds: float = 0.0) -> RunSummary:
    """Numbers about finished groups, in whatever order they finished.

    Args:
        groups: Of one run.
        seconds: Wall time the rollouts took.
    """
    tally = RunTally()
    for group in groups:
        tally.add(group)
    return tally.summary(seconds)


def timing_shares(timings: Mapping[str, float]) -> dict[str, float]:
    """Each timed part as a share of the total, from 0 to 1, the largest first.

    Args:
        timings: ``timing/rollout/<part>`` in seconds, with ``total`` among them. Shares in percent
            (``*_pct``), the parts of single shards and ``run_rollouts`` (all of a worker's call)
            are left out; without a total there are no shares.
    """
    parts = {
        name.removeprefix(_TIMER_PREFIX): value
        for name, value in timings.items()
        if name.startswith(_TIMER_PREFIX) and not name.endswith("_pct") and "/shard/" not in name
    }
    total = parts.pop("total", 0.0)
    parts.pop("run_rollouts", None)
    if total <= 0:
        return {}
    shares = {name: value / total for name, value in parts.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
