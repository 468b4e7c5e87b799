"""``compare``: two evaluations, task by task."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from gymrl.errors import ConfigError
from gymrl.evaluation.differences import config_differences
from gymrl.evaluation.statistics import (
    CONFIDENCE,
    Estimate,
    mean_of,
    mean_over_tasks,
    sign_test,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.evaluation.reading import Evaluation, TaskOutcome

COMPARISON_SCHEMA = "gymrl.comparison.v1"
_SAME = 1e-9
_SHOWN_TASKS = 5


class TaskDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One task in both runs.

    Attributes:
        task_id: Its id.
        source: Its task source.
        before: Mean reward in the first run.
        after: Mean reward in the second.
        attempts_before: Rewards behind `before`.
        attempts_after: Rewards behind `after`.
    """

    task_id: str
    source: str
    before: float
    after: float
    attempts_before: int
    attempts_after: int

    @property
    def difference(self) -> float:
        """Second run less first."""
        return self.after - self.before


class SourceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Paired differences over tasks.

    Attributes:
        before: Mean of the tasks' means in the first run; None without a task in both.
        after: The same in the second.
        difference: Mean of the differences with Student's t interval over tasks.
        better: Tasks whose mean reward rose.
        worse: Tasks whose mean reward fell.
        same: Tasks where it stayed.
        p_value: Exact two-sided sign test of `better` against `worse`.
    """

    before: float | None
    after: float | None
    difference: Estimate | None
    better: int
    worse: int
    same: int
    p_value: float


class BenchmarkComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark in both runs.

    Attributes:
        total: Over its tasks.
        sources: By task source.
        tasks: Every task with a reward in both runs, the largest fall first.
        only_before: Tasks that only the first run plans.
        only_after: Tasks that only the second run plans.
        changed: Tasks whose input is another one; they are not compared.
        unscored: Tasks of both without a reward in one of them: failed, or missing.
    """

    total: SourceComparison
    sources: dict[str, SourceComparison]
    tasks: tuple[TaskDifference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    changed: tuple[str, ...]
    unscored: tuple[str, ...]

    @property
    def better(self) -> tuple[TaskDifference, ...]:
        """Tasks that rose, the largest rise first."""
        return tuple(task for task in reversed(self.tasks) if task.difference > _SAME)

    @property
    def worse(self) -> tuple[TaskDifference, ...]:
        """Tasks that fell, the largest fall first."""
        return tuple(task for task in self.tasks if task.difference < -_SAME)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two evaluations.

    Attributes:
        schema_name: The format, ``schema`` in JSON.
        before: Where the first was read.
        after: Where the second was read.
        confidence: Of the intervals.
        settings: What was asked otherwise, one line a setting.
        only_before: Benchmarks that only the first has.
        only_after: Benchmarks that only the second has.
        benchmarks: Those of both, by label.
    """

    schema_name: str = msgspec.field(default=COMPARISON_SCHEMA, name="schema")
    before: str
    after: str
    confidence: float
    settings: tuple[str, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    benchmarks: dict[str, BenchmarkComparison]

    def to_json(self) -> str:
        """As JSON: two spaces, a newline at the end."""
        return json.dumps(msgspec.to_builtins(self), indent=2, ensure_ascii=False) + "\n"


def compare(
    before: Evaluation,
    after: Evaluation,
    *,
    common_only: bool = False,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compare two evaluations, each task with itself.

    A task's number is the mean of its rewards. The difference is a mean over tasks of one
    difference a task, with Student's t interval; the sign test asks nothing of the rewards but
    their order. Rows that failed or are missing have no reward: a task that has none in one run
    is listed, not compared.

    Args:
        before: The first run.
        after: The second.
        common_only: Compare what both have, where their tasks are not the same.
        confidence: Of the intervals, between 0 and 1.

    Raises:
        ConfigError: The tasks are not the same, and `common_only` is off; or there is no
            benchmark that both have.
    """
    first, second = _by_label(before), _by_label(after)
    labels = [label for label in first if label in second]
    if not labels:
        raise ConfigError(
            f"{before.directory} and {after.directory} have no benchmark in common: "
            f"{', '.join(first)} against {', '.join(second)}",
            setting="directory",
        )
    only_before = tuple(label for label in first if label not in second)
    only_after = tuple(label for label in second if label not in first)
    benchmarks = {label: _benchmark(first[label], second[label], confidence) for label in labels}
    if not common_only:
        _require_same(before, after, benchmarks, only_before + only_after)
    return Comparison(
        before=before.directory,
        after=after.directory,
        confidence=confidence,
        settings=tuple(config_differences(before.plan, after.plan)),
        only_before=only_before,
        only_after=only_after,
        benchmarks=benchmarks,
    )


def _by_label(evaluation: Evaluation) -> dict[str, list[TaskOutcome]]:
    found: dict[str, list[TaskOutcome]] = {b.label: [] for b in evaluation.plan.benchmarks}
    for task in evaluation.tasks:
        found[task.key.benchmark].append(task)
    return found


def _require_same(
    before: Evaluation,
    after: Evaluation,
    benchmarks: dict[str, BenchmarkComparison],
    others: tuple[str, ...],
) -> None:
    told = [f"benchmark {label!r} is in one of them" for label in others]
    for label, found in benchmarks.items():
        for tasks, what in (
            (found.only_before, f"only in {before.directory}"),
            (found.only_after, f"only in {after.directory}"),
            (found.changed, "with another input"),
        ):
            if tasks:
                shown = ", ".join(tasks[:_SHOWN_TASKS])
                more = ", ..." if len(tasks) > _SHOWN_TASKS else ""
                told.append(f"{label}: {len(tasks)} tasks {what}: {shown}{more}")
    if told:
        lines = "".join(f"\n  {line}" for line in told)
        raise ConfigError(
            f"the two evaluations are not of the same tasks:{lines}\n"
            "Compare only what both have (common_only), if that is what you want",
            setting="common_only",
        )


def _benchmark(
    before: Sequence[TaskOutcome], after: Sequence[TaskOutcome], confidence: float
) -> BenchmarkComparison:
    first = {task.task_id: task for task in before}
    second = {task.task_id: task for task in after}
    both = [task_id for task_id in first if task_id in second]
    changed = [t for t in both if first[t].key.digest != second[t].key.digest]
    same = [t for t in both if first[t].key.digest == second[t].key.digest]
    unscored = [t for t in same if not (first[t].attempts and second[t].attempts)]
    compared = [
        _difference(first[t], second[t]) for t in same if first[t].attempts and second[t].attempts
    ]
    compared.sort(key=lambda task: (task.difference, task.task_id))
    by_source: dict[str, list[TaskDifference]] = {}
    for task in compared:
        by_source.setdefault(task.source, []).append(task)
    return BenchmarkComparison(
        total=_paired(compared, confidence),
        sources={source: _paired(part, confidence) for source, part in sorted(by_source.items())},
        tasks=tuple(compared),
        only_before=tuple(sorted(first.keys() - second.keys())),
        only_after=tuple(sorted(second.keys() - first.keys())),
        changed=tuple(changed),
        unscored=tuple(unscored),
    )


def _difference(before: TaskOutcome, after: TaskOutcome) -> TaskDifference:
    first, second = before.rewards, after.rewards
    return TaskDifference(
        task_id=before.task_id,
        source=before.source,
        before=mean_of(first),
        after=mean_of(second),
        attempts_before=len(first),
        attempts_after=len(second),
    )


def _paired(tasks: Sequence[TaskDifference], confidence: float) -> SourceComparison:
    differences = [task.difference for task in tasks]
    better = sum(difference > _SAME for difference in differences)
    worse = sum(difference < -_SAME for difference in differences)
    count = len(tasks)
    return SourceComparison(
        before=mean_of([task.before for task in tasks]) if tasks else None,
        after=mean_of([task.after for task in tasks]) if tasks else None,
        difference=mean_over_tasks(differences, confidence) if count else None,
        better=better,
        worse=worse,
        same=count - better - worse,
        p_value=sign_test(better, worse),
    )
