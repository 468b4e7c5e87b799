"""Two evaluations side by side for the page: the numbers of ``gymrl eval report A B``.

The later one, B, is the one whose rollouts the viewer lists; its tasks lead to their groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gymrl.evaluation.comparison import SourceComparison, compare

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gymrl.evaluation.comparison import BenchmarkComparison, TaskDifference
    from gymrl.evaluation.reading import Evaluation
    from gymrl.viewer.index import Snapshot

SHOWN_TASKS = 20
"""Tasks of each kind that are named; the rest are counted."""


class ComparedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark, or one task source of it, in both runs."""

    name: str
    numbers: SourceComparison


class ChangedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that rose or fell.

    Attributes:
        number: Its place in the plan of B, from 0.
        before: Its mean reward in A.
        after: In B.
        group: Its group's number in the viewer; None where it has no row there.
    """

    number: int
    task_id: str
    before: float
    after: float
    difference: float
    group: int | None


class TaskNames(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks that are not compared: how many, and the first of them."""

    count: int
    names: tuple[str, ...]


class ComparedBenchmark(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark in both runs.

    Attributes:
        label: Its name in both.
        total: Over the tasks that have a reward in both.
        sources: By task source; none where there is one only.
        differences: B less A of every task, ascending.
        better: Tasks that rose, the largest rise first.
        worse: Tasks that fell, the largest fall first.
        left_out: Tasks that are not compared, by the reason.
    """

    label: str
    total: ComparedPart
    sources: list[ComparedPart]
    differences: list[float]
    better: list[ChangedTask]
    worse: list[ChangedTask]
    left_out: dict[str, TaskNames]


class ComparisonView(msgspec.Struct, frozen=True, kw_only=True):
    """Two evaluations; fields as in :class:`~gymrl.evaluation.comparison.Comparison`."""

    before: str
    after: str
    confidence: float
    settings: tuple[str, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    benchmarks: list[ComparedBenchmark]


def view_of_comparison(before: Evaluation, after: Evaluation, snapshot: Snapshot) -> ComparisonView:
    """What the page shows of two evaluations: all that they have in common, and what they have not.

    Args:
        before: A.
        after: B.
        snapshot: The viewer's index of B's file.

    Raises:
        ConfigError: There is no benchmark that both have.
    """
    found = compare(before, after, common_only=True)
    places: dict[tuple[str, str], tuple[int, int | None]] = {}
    for number, task in enumerate(after.tasks):
        row = None if task.line is None else snapshot.row_at_line(task.line)
        group = None if row is None else int(snapshot.columns["group"][row])
        places[task.key.benchmark, task.task_id] = (number, group)
    return ComparisonView(
        before=found.before,
        after=found.after,
        confidence=found.confidence,
        settings=found.settings,
        only_before=found.only_before,
        only_after=found.only_after,
        benchmarks=[
            _benchmark(label, benchmark, places) for label, benchmark in found.benchmarks.items()
        ],
    )


def _benchmark(
    label: str,
    benchmark: BenchmarkComparison,
    places: dict[tuple[str, str], tuple[int, int | None]],
) -> ComparedBenchmark:
    def changed(tasks: Iterable[TaskDifference]) -> list[ChangedTask]:
        return [
            ChangedTask(
                number=places[label, task.task_id][0],
                task_id=task.task_id,
                before=task.before,
                after=task.after,
                difference=task.difference,
                group=places[label, task.task_id][1],
            )
            for task in tasks
        ]

    sources = benchmark.sources if len(benchmark.sources) > 1 else {}
    left_out = {
        "only in A": benchmark.only_before,
        "only in B": benchmark.only_after,
        "with another input": benchmark.changed,
        "without a reward in A or B": benchmark.unscored,
    }
    return ComparedBenchmark(
        label=label,
        total=ComparedPart(name=label, numbers=benchmark.total),
        sources=[ComparedPart(name=name, numbers=numbers) for name, numbers in sources.items()],
        differences=[task.difference for task in benchmark.tasks],
        better=changed(benchmark.better[:SHOWN_TASKS]),
        worse=changed(benchmark.worse[:SHOWN_TASKS]),
        left_out={
            why: TaskNames(count=len(names), names=names[:SHOWN_TASKS])
            for why, names in left_out.items()
            if names
        },
    )
