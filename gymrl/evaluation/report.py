"""``report_evaluation``: an evaluation in numbers, per benchmark and per task source.

A failed or missing row has no reward, so it enters no mean and no pass@k; it is counted beside them,
and an estimate that tasks had to be left out of says how many.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.benchmark.summary import PASS_REWARD
from gymrl.evaluation.statistics import (
    CONFIDENCE,
    Estimate,
    clustered_mean,
    mean_of,
    mean_over_tasks,
    pass_at_k,
    pass_hat_k,
    percentile,
    powers_up_to,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gymrl.evaluation.reading import Attempt, Evaluation, FailedAttempt, TaskOutcome

METRICS_SCHEMA = "gymrl.benchmark-metrics.v1"


class PassEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """pass@k or pass^k over tasks.

    Attributes:
        k: Attempts.
        estimate: Over the tasks with at least `k` results; None where there is none.
        left_out: Tasks with fewer results than `k`.
    """

    k: int
    estimate: Estimate | None
    left_out: int


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """How values are spread.

    Attributes:
        mean: Of all.
        median: Percentiles are linear between the two nearest values.
        p95: The 95th.
        max: The largest.
    """

    mean: float
    median: float
    p95: float
    max: float


class ComponentMean(msgspec.Struct, frozen=True, kw_only=True):
    """A reward component: its mean over the rows that have it, and how many those are."""

    mean: float
    rows: int


class FailureCount(msgspec.Struct, frozen=True, kw_only=True):
    """Rows whose last try failed with one class of error, and the first one's message."""

    error: str
    rows: int
    example: str


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a benchmark, or of one task source in it.

    Attributes:
        tasks: Planned.
        repeats: Attempts at each task.
        rows: Attempts that were asked for; the next three add up to it.
        scored: With a reward.
        failed: Without one, after their last try.
        missing: Never made, or not ended.
        unscored_tasks: Tasks without any reward.
        reward: Mean over the scored rows, its interval clustered by task; None without any.
        passed: Scored rows whose verifier's reward is at least the threshold.
        pass_at: That at least one of k attempts passes.
        pass_hat: That all of k attempts pass.
        truncated: Scored rows whose last response was cut by a token limit.
        truncation_rate: Their share of the scored rows.
        broken_prefixes: Scored rows whose tokens are recorded up to where the chat template rewrote
            history.
        without_tokens: Scored rows whose tokens nobody recorded: the server returns none, or
            nothing was sampled. Their lengths are those that the server says.
        generated_tokens: Sampled tokens a row.
        total_tokens: All tokens a row.
        turns: Model calls a row.
        components: Reward components by name.
        failures: By class, the most frequent first.
    """

    tasks: int
    repeats: int
    rows: int
    scored: int
    failed: int
    missing: int
    unscored_tasks: int
    reward: Estimate | None
    passed: int
    pass_at: tuple[PassEstimate, ...]
    pass_hat: tuple[PassEstimate, ...]
    truncated: int
    truncation_rate: float | None
    broken_prefixes: int
    without_tokens: int
    generated_tokens: Distribution | None
    total_tokens: Distribution | None
    turns: Distribution | None
    components: dict[str, ComponentMean]
    failures: tuple[FailureCount, ...]


class BenchmarkReport(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark.

    Attributes:
        name: ``NAME`` or ``NAME/FLAVOR``.
        total: Over all of its tasks.
        sources: By task source, in order of first appearance.
    """

    name: str
    total: SourceReport
    sources: dict[str, SourceReport]


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole evaluation; ``benchmark_metrics.json`` is this as JSON.

    Attributes:
        schema_name: The format, ``schema`` in JSON.
        complete: Every row has a result.
        config_digest: Of the plan.
        settings: Policy, sampling and seed.
        pass_reward: A row passes when its verifier's reward is at least this.
        confidence: Of all intervals.
        duplicates: Lines that were passed over, because their row had its result.
        foreign: Lines that were passed over, because their row is not in the plan.
        benchmarks: By label, in the order of the plan.
    """

    schema_name: str = msgspec.field(default=METRICS_SCHEMA, name="schema")
    complete: bool
    config_digest: str
    settings: dict[str, Any]
    pass_reward: float
    confidence: float
    duplicates: int
    foreign: int
    benchmarks: dict[str, BenchmarkReport]

    def to_json(self) -> str:
        """The report's file: two spaces, a newline at the end."""
        return json.dumps(msgspec.to_builtins(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def num_failed(self) -> int:
        """Rows of all benchmarks that failed."""
        return sum(benchmark.total.failed for benchmark in self.benchmarks.values())

    @property
    def num_missing(self) -> int:
        """Rows of all benchmarks that were not made."""
        return sum(benchmark.total.missing for benchmark in self.benchmarks.values())


def report_evaluation(
    evaluation: Evaluation, *, pass_reward: float = PASS_REWARD, confidence: float = CONFIDENCE
) -> EvaluationReport:
    """The numbers of an evaluation, finished or not.

    Args:
        evaluation: As read.
        pass_reward: A row passes when its verifier's reward is at least this.
        confidence: Of the intervals, between 0 and 1.
    """
    by_label: dict[str, list[TaskOutcome]] = {b.label: [] for b in evaluation.plan.benchmarks}
    for task in evaluation.tasks:
        by_label[task.key.benchmark].append(task)
    benchmarks = {}
    for planned in evaluation.plan.benchmarks:
        tasks = by_label[planned.label]
        by_source: dict[str, list[TaskOutcome]] = {}
        for task in tasks:
            by_source.setdefault(task.source, []).append(task)
        benchmarks[planned.label] = BenchmarkReport(
            name=planned.name,
            total=report_tasks(tasks, pass_reward, confidence),
            sources={
                source: report_tasks(part, pass_reward, confidence)
                for source, part in by_source.items()
            },
        )
    return EvaluationReport(
        complete=all(len(task.attempts) == task.repeats for task in evaluation.tasks),
        config_digest=evaluation.plan.config_digest,
        settings=msgspec.to_builtins(evaluation.plan.settings),
        pass_reward=pass_reward,
        confidence=confidence,
        duplicates=evaluation.duplicates,
        foreign=evaluation.foreign,
        benchmarks=benchmarks,
    )


def report_tasks(
    tasks: Sequence[TaskOutcome], pass_reward: float = PASS_REWARD, confidence: float = CONFIDENCE
) -> SourceReport:
    """The numbers of some tasks; see :func:`report_evaluation`."""
    attempts = [attempt for task in tasks for attempt in task.attempts.values()]
    failed = [attempt for task in tasks for attempt in task.failed.values()]
    repeats = max((task.repeats for task in tasks), default=0)
    counts = [(len(task.attempts), task.passed(pass_reward)) for task in tasks]
    truncated = sum(attempt.is_truncated for attempt in attempts)
    rewards = [task.rewards for task in tasks]
    return SourceReport(
        tasks=len(tasks),
        repeats=repeats,
        rows=sum(task.repeats for task in tasks),
        scored=len(attempts),
        failed=len(failed),
        missing=sum(task.missing for task in tasks),
        unscored_tasks=sum(not task.attempts for task in tasks),
        reward=clustered_mean(rewards, confidence) if attempts else None,
        passed=sum(passed for _, passed in counts),
        pass_at=_over_tasks(pass_at_k, counts, repeats, confidence),
        pass_hat=_over_tasks(pass_hat_k, counts, repeats, confidence),
        truncated=truncated,
        truncation_rate=truncated / len(attempts) if attempts else None,
        broken_prefixes=sum(attempt.has_broken_prefix for attempt in attempts),
        without_tokens=sum(not attempt.has_tokens for attempt in attempts),
        generated_tokens=_distribution([attempt.generated for attempt in attempts]),
        total_tokens=_distribution([attempt.tokens for attempt in attempts]),
        turns=_distribution([attempt.turns for attempt in attempts]),
        components=_components(attempts),
        failures=_failures(failed),
    )


def _over_tasks(
    of_task: Callable[[int, int, int], float],
    counts: Sequence[tuple[int, int]],
    repeats: int,
    confidence: float,
) -> tuple[PassEstimate, ...]:
    estimates = []
    for k in powers_up_to(repeats):
        values = [of_task(made, passed, k) for made, passed in counts if made >= k]
        estimate = mean_over_tasks(values, confidence) if values else None
        left_out = len(counts) - len(values)
        estimates.append(PassEstimate(k=k, estimate=estimate, left_out=left_out))
    return tuple(estimates)


def _distribution(found: Sequence[int | None]) -> Distribution | None:
    values = sorted(value for value in found if value is not None)
    if not values:
        return None
    return Distribution(
        mean=sum(values) / len(values),
        median=percentile(values, 0.5),
        p95=percentile(values, 0.95),
        max=values[-1],
    )


def _components(attempts: Sequence[Attempt]) -> dict[str, ComponentMean]:
    values: dict[str, list[float]] = {}
    for attempt in attempts:
        for name, value in (attempt.components or {}).items():
            values.setdefault(name, []).append(value)
    return {
        name: ComponentMean(mean=mean_of(held), rows=len(held))
        for name, held in sorted(values.items())
    }


def _failures(failed: Sequence[FailedAttempt]) -> tuple[FailureCount, ...]:
    examples: dict[str, str] = {}
    for attempt in failed:
        examples.setdefault(attempt.error, attempt.message)
    counts = Counter(attempt.error for attempt in failed)
    return tuple(
        FailureCount(error=error, rows=count, example=examples[error])
        for error, count in counts.most_common()
    )
