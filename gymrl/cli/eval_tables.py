"""Reports and comparisons as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from gymrl.cli.consoles import printable
from gymrl.evaluation.markdown import (
    compared_cells,
    compared_sources,
    labelled_sources,
    number,
    pass_cells,
    signed,
    source_cells,
)

if TYPE_CHECKING:
    from rich.console import Console

    from gymrl.evaluation.comparison import BenchmarkComparison, Comparison
    from gymrl.evaluation.report import EvaluationReport, SourceReport

_SHOWN_TASKS = 10
_EXAMPLE_CHARS = 300


def print_report(console: Console, report: EvaluationReport) -> None:
    """The numbers of every benchmark, pass@k, components and failures."""
    named = list(labelled_sources(report))
    level = f"{report.confidence:.0%}"
    table = _table("benchmark", "scored", "failed", "missing", f"mean reward [{level}]", "passed",
                   "cut off", "sampled tokens\nmean, p95", "turns")  # fmt: skip
    for name, numbers in named:
        table.add_row(_name(name), *source_cells(numbers))
    console.print(table)
    console.print(_pass_table(named, level))
    for name, numbers in named:
        for component, held in numbers.components.items():
            _say(console, f"{name}: {component} {held.mean:.3f} on average of {held.rows} rows")
    for label, benchmark in report.benchmarks.items():
        for failure in benchmark.total.failures:
            text = " ".join(failure.example.split())
            shown = text if len(text) <= _EXAMPLE_CHARS else f"{text[:_EXAMPLE_CHARS]}..."
            _say(console, f"{label}: {failure.rows} rows failed with {failure.error}, e.g. {shown}")
        if benchmark.total.without_tokens:
            _say(
                console,
                f"{label}: {benchmark.total.without_tokens} rows have no tokens on record: the "
                "server returns none, or nothing was sampled",
            )
    if not report.complete:
        _say(
            console,
            f"not complete: {report.num_failed} rows failed and {report.num_missing} are missing; "
            "they are in no mean and no pass@k",
        )
    if report.duplicates or report.foreign:
        _say(
            console,
            f"passed over: {report.duplicates} lines of rows that had their result, "
            f"{report.foreign} of rows that are not in the plan",
        )


def _pass_table(named: list[tuple[str, SourceReport]], level: str) -> Table:
    table = _table("benchmark", "k", f"pass@k [{level}]", f"pass^k [{level}]", "tasks left out")
    for name, numbers in named:
        for at, cells in zip(numbers.pass_at, pass_cells(numbers), strict=True):
            table.add_row(_name(name if at.k == 1 else ""), *cells)
    return table


def print_comparison(console: Console, comparison: Comparison) -> None:
    """What differs, the paired differences, and the tasks behind them."""
    _say(console, f"A: {comparison.before}")
    _say(console, f"B: {comparison.after}")
    for line in comparison.settings:
        _say(console, f"   {line}")
    for label in comparison.only_before:
        _say(console, f"   benchmark {label!r} is only in A")
    for label in comparison.only_after:
        _say(console, f"   benchmark {label!r} is only in B")
    level = f"{comparison.confidence:.0%}"
    table = _table(
        "benchmark", "A", "B", f"B - A [{level}]", "better", "worse", "same", "sign test p"
    )
    for name, found in compared_sources(comparison):
        table.add_row(_name(name), *compared_cells(found))
    console.print(table)
    for label, benchmark in comparison.benchmarks.items():
        _print_tasks(console, label, benchmark)


def _print_tasks(console: Console, label: str, benchmark: BenchmarkComparison) -> None:
    for what, tasks in (("better", benchmark.better), ("worse", benchmark.worse)):
        if not tasks:
            continue
        _say(console, f"{label}: {len(tasks)} tasks {what} in B")
        for task in tasks[:_SHOWN_TASKS]:
            change = f"{number(task.before)} -> {number(task.after)}"
            _say(console, f"   {task.task_id}  {change}  ({signed(task.difference)})")
        if len(tasks) > _SHOWN_TASKS:
            _say(console, f"   ... and {len(tasks) - _SHOWN_TASKS} more")
    for what, names in (
        ("only in A", benchmark.only_before),
        ("only in B", benchmark.only_after),
        ("with another input", benchmark.changed),
        ("without a reward in A or B", benchmark.unscored),
    ):
        if names:
            more = ", ..." if len(names) > _SHOWN_TASKS else ""
            shown = ", ".join(names[:_SHOWN_TASKS])
            _say(console, f"{label}: {len(names)} tasks {what}: {shown}{more}")


def _table(first: str, *others: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for header in others:
        table.add_column(header, justify="right")
    return table


def _name(text: str) -> Text:
    """A name as a cell: brackets in it are no markup."""
    return Text(printable(text))


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
