"""An evaluation's report for the page: the numbers of ``gymrl eval report``, and where tasks are.

All numbers come from :mod:`gymrl.evaluation`. Here they are only arranged, and each task gets the
number of its group in the file that the viewer lists.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.errors import ConfigError
from gymrl.evaluation.journal import PLAN_FILE, ROLLOUTS_FILE
from gymrl.evaluation.reading import Evaluation, read_evaluation
from gymrl.evaluation.report import EvaluationReport, SourceReport, report_evaluation
from gymrl.evaluation.statistics import Histogram, mean_of, reward_histogram
from gymrl.viewer.comparison import ComparisonView, view_of_comparison

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gymrl.evaluation.reading import TaskOutcome
    from gymrl.evaluation.report import BenchmarkReport
    from gymrl.viewer.index import Snapshot

MAX_TASKS = 200
"""Tasks of one answer."""
_ORDERS = ("plan", "mean", "failed")


class PartView(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark, or one task source of it.

    Attributes:
        name: The source's; of the whole benchmark its label.
        numbers: As the report has them.
        histogram: Of the rewards; None without any.
    """

    name: str
    numbers: SourceReport
    histogram: Histogram | None


class BenchmarkView(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark.

    Attributes:
        label: Its name in the evaluation.
        name: ``NAME`` or ``NAME/FLAVOR``.
        total: Over all of its tasks.
        sources: By task source; none where there is one only, which is all of it.
    """

    label: str
    name: str
    total: PartView
    sources: list[PartView]


class ReportView(msgspec.Struct, frozen=True, kw_only=True):
    """A whole evaluation; fields as in :class:`~gymrl.evaluation.report.EvaluationReport`.

    Attributes:
        failed: Rows that failed.
        missing: Rows that were not made, or have not ended.
    """

    complete: bool
    failed: int
    missing: int
    settings: dict[str, Any]
    pass_reward: float
    confidence: float
    duplicates: int
    foreign: int
    benchmarks: list[BenchmarkView]


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """A task in the list.

    Attributes:
        number: Its place in the plan, from 0.
        passed: Attempts whose verifier's reward is at least the threshold.
        mean: Of its rewards; None without any.
        group: Its group's number in the viewer; None while it has no row there.
    """

    number: int
    task_id: str
    source: str
    repeats: int
    scored: int
    failed: int
    missing: int
    passed: int
    mean: float | None
    group: int | None


class TaskPage(msgspec.Struct, frozen=True):
    """One page of a benchmark's tasks."""

    total: int
    offset: int
    tasks: list[TaskView]


class TaskQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks, in which order.

    Attributes:
        sort: ``plan``, ``mean`` or ``failed``; ``-`` before it descends. Tasks without a reward
            come last by mean, and ties are in the order of the plan.
    """

    benchmark: str = ""
    sort: str = "plan"
    offset: int = 0
    limit: int = 50


def parse_task_query(parameters: Mapping[str, str]) -> TaskQuery:
    """The query of an address.

    Raises:
        ConfigError: A parameter has no such value.
    """
    query = TaskQuery(
        benchmark=parameters.get("benchmark", ""),
        sort=parameters.get("sort", "plan"),
        offset=_number(parameters, "offset", 0),
        limit=min(_number(parameters, "limit", 50), MAX_TASKS),
    )
    if query.sort.removeprefix("-") not in _ORDERS:
        raise ConfigError(
            f"sort={query.sort[:40]}: tasks are sorted by {', '.join(_ORDERS)}", setting="sort"
        )
    return query


def _number(parameters: Mapping[str, str], name: str, default: int) -> int:
    text = parameters.get(name, str(default))
    if not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"{name}={text[:40]} is no position", setting=name)
    return int(text)


def view_of(evaluation: Evaluation, report: EvaluationReport) -> ReportView:
    """What the page shows of an evaluation.

    Args:
        evaluation: As read.
        report: Of it.
    """
    rewards: dict[str, dict[str, list[float]]] = {label: {} for label in report.benchmarks}
    for task in evaluation.tasks:
        rewards[task.key.benchmark].setdefault(task.source, []).extend(task.rewards)
    return ReportView(
        complete=report.complete,
        failed=report.num_failed,
        missing=report.num_missing,
        settings=report.settings,
        pass_reward=report.pass_reward,
        confidence=report.confidence,
        duplicates=report.duplicates,
        foreign=report.foreign,
        benchmarks=[
            _benchmark(label, benchmark, rewards[label])
            for label, benchmark in report.benchmarks.items()
        ],
    )


def _benchmark(
    label: str, benchmark: BenchmarkReport, rewards: dict[str, list[float]]
) -> BenchmarkView:
    everything = [reward for held in rewards.values() for reward in held]
    sources = benchmark.sources if len(benchmark.sources) > 1 else {}
    return BenchmarkView(
        label=label,
        name=benchmark.name,
        total=_part(label, benchmark.total, everything),
        sources=[_part(name, numbers, rewards[name]) for name, numbers in sources.items()],
    )


def _part(name: str, numbers: SourceReport, rewards: list[float]) -> PartView:
    return PartView(name=name, numbers=numbers, histogram=reward_histogram(rewards))


def list_tasks(
    evaluation: Evaluation, pass_reward: float, query: TaskQuery, snapshot: Snapshot
) -> TaskPage:
    """One page of a benchmark's tasks.

    Args:
        evaluation: As read.
        pass_reward: A row passes when its verifier's reward is at least this.
        query: Which, and in which order.
        snapshot: The viewer's index of the same file.
    """
    chosen = [
        (number, task)
        for number, task in enumerate(evaluation.tasks)
        if task.key.benchmark == query.benchmark
    ]
    down = query.sort.startswith("-")
    order = query.sort.removeprefix("-")
    if order == "plan" and down:
        chosen.reverse()
    elif order == "failed":
        chosen.sort(key=lambda entry: len(entry[1].failed), reverse=down)
    elif order == "mean":
        means = {number: _mean(task) for number, task in chosen}
        scored = [(mean, number) for number, mean in means.items() if mean is not None]
        scored.sort(key=lambda entry: -entry[0] if down else entry[0])
        by_number = dict(chosen)
        ordered = [number for _, number in scored]
        ordered += [number for number, mean in means.items() if mean is None]
        chosen = [(number, by_number[number]) for number in ordered]
    page = chosen[query.offset : query.offset + query.limit]
    return TaskPage(
        total=len(chosen),
        offset=query.offset,
        tasks=[_task(number, task, pass_reward, snapshot) for number, task in page],
    )


def _mean(task: TaskOutcome) -> float | None:
    rewards = task.rewards
    return mean_of(rewards) if rewards else None


def _task(number: int, task: TaskOutcome, pass_reward: float, snapshot: Snapshot) -> TaskView:
    row = None if task.line is None else snapshot.row_at_line(task.line)
    return TaskView(
        number=number,
        task_id=task.task_id,
        source=task.source,
        repeats=task.repeats,
        scored=len(task.attempts),
        failed=len(task.failed),
        missing=task.missing,
        passed=task.passed(pass_reward),
        mean=_mean(task),
        group=None if row is None else int(snapshot.columns["group"][row]),
    )


class EvaluationReports:
    """The report of the evaluation that a file is of, made anew when the file has changed.

    Args:
        file: The evaluation's rollouts; its plan lies beside it.
        against: The directory of another evaluation, with which it is compared.
    """

    def __init__(self, file: Path, against: Path | None = None) -> None:
        self._file = file
        self._other = None if against is None else EvaluationReports(against / ROLLOUTS_FILE)
        self._lock = anyio.Lock()
        self._stamp: tuple[tuple[int, int, int], ...] = ()
        self._held: tuple[Evaluation, ReportView] | None = None

    async def view(self) -> ReportView:
        """The report as the files are now.

        They are read in a thread, for one who asks at a time.

        Raises:
            ConfigError: The plan is gone or was changed, or its parts do not fit each other.
            RowValueError: A line before the last is no record; names file and line.
        """
        _, view = await self._current()
        return view

    async def tasks(self, parameters: Mapping[str, str], snapshot: Snapshot) -> TaskPage:
        """One page of a benchmark's tasks, as the files are now.

        Args:
            parameters: Of the address; see :class:`TaskQuery`.
            snapshot: The viewer's index of the same file.

        Raises:
            ConfigError, RowValueError: As :meth:`view`, and where a parameter has no such value.
        """
        query = parse_task_query(parameters)
        evaluation, view = await self._current()
        return await anyio.to_thread.run_sync(
            list_tasks, evaluation, view.pass_reward, query, snapshot
        )

    @property
    def has_other(self) -> bool:
        """Whether there is another evaluation to compare with."""
        return self._other is not None

    async def check_other(self) -> None:
        """Read the evaluation to compare with, where there is one.

        Raises:
            ConfigError, RowValueError: It can't be read.
        """
        if self._other is not None:
            await self._other.view()

    async def comparison(self, snapshot: Snapshot) -> ComparisonView:
        """This evaluation compared with the other one, as the files of both are now.

        Args:
            snapshot: The viewer's index of this one's file.

        Raises:
            ConfigError, RowValueError: As :meth:`view`, of either; or there is no other one, or no
                benchmark that both have.
        """
        if self._other is None:
            raise ConfigError(
                "there is no other evaluation to compare with: gymrl view B --against A",
                setting="against",
            )
        before, _ = await self._other._current()
        after, _ = await self._current()
        return await anyio.to_thread.run_sync(view_of_comparison, before, after, snapshot)

    async def _current(self) -> tuple[Evaluation, ReportView]:
        async with self._lock:
            return await anyio.to_thread.run_sync(self._read)

    def _read(self) -> tuple[Evaluation, ReportView]:
        stamp = tuple(_stamp(self._file.with_name(name)) for name in (self._file.name, PLAN_FILE))
        if self._held is None or stamp != self._stamp:
            evaluation = read_evaluation(self._file.parent)
            self._held = evaluation, view_of(evaluation, report_evaluation(evaluation))
            self._stamp = stamp
        return self._held


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", setting=str(path)) from error
    return found.st_ino, found.st_size, found.st_mtime_ns
