"""A run's summary as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from gymrl.benchmark.summary import timing_shares

if TYPE_CHECKING:
    from rich.console import Console

    from gymrl.benchmark.summary import FailureSummary, RunSummary, SourceSummary

_SHARES_AT_MOST = 6
_EXAMPLE_CHARS = 400


def _ratio(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def source_cells(source: SourceSummary) -> list[str]:
    """The cells of one row of the table, as text."""
    turns = f"{source.turns / source.scored:.1f}" if source.scored else "-"
    return [
        source.source,
        str(source.prompts),
        str(source.rows),
        str(source.failed),
        _ratio(source.pass_rate, ".1%"),
        _ratio(source.mean_reward, ".3f"),
        f"{source.mixed_groups} of {source.prompts}",
        f"{source.prompt_tokens + source.generated_tokens:,}",
        f"{source.generated_tokens:,}",
        turns,
        str(source.truncated),
    ]


def summary_table(summary: RunSummary) -> Table:
    """One line a task source."""
    table = Table(title=None, show_edge=False, pad_edge=False)
    table.add_column("task source", no_wrap=True)
    for header in (
        "prompts",
        "rows",
        "failed",
        "pass rate",
        "mean reward",
        "groups with\ndiffering rewards",
        "tokens",
        "sampled",
        "turns\na row",
        "cut off",
    ):
        table.add_column(header, justify="right")
    for source in summary.sources:
        table.add_row(*source_cells(source))
    return table


def timing_line(summary: RunSummary) -> str:
    """Where the time went, largest share first."""
    speed = summary.generated_tokens / summary.seconds if summary.seconds > 0 else 0.0
    text = f"time: {summary.seconds:.1f} s, {speed:.1f} sampled tokens/s"
    shares = list(timing_shares(summary.timings).items())[:_SHARES_AT_MOST]
    if shares:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in shares)
        text = f"{text}; of the rollout call: {parts}"
    return text


def failure_lines(failure: FailureSummary) -> list[str]:
    """A failure class with its count, and its first example."""
    example = failure.example
    message = " ".join(example.message.split())
    if len(message) > _EXAMPLE_CHARS:
        message = f"{message[:_EXAMPLE_CHARS]}... ({len(message) - _EXAMPLE_CHARS} more characters)"
    place = [
        f"{name} {value}"
        for name, value in (
            ("row", example.row),
            ("turn", example.turn),
            ("agent", example.agent),
            ("instance", example.instance),
            ("status", example.status),
        )
        if value is not None
    ]
    times = f"{failure.count} row{'s' if failure.count > 1 else ''}"
    return [
        f"{failure.error} ({example.kind.value}): {times}",
        f"    e.g. {', '.join(place) or 'no place known'}: {message}",
    ]


def print_summary(console: Console, summary: RunSummary) -> None:
    """The table, where the time went, and the failures by class."""
    console.print(summary_table(summary))
    console.print(timing_line(summary), markup=False, highlight=False)
    if summary.failures:
        console.print(
            f"failed rows: {summary.num_failed}",
            markup=False,
            highlight=False,
        )
    for failure in summary.failures:
        for line in failure_lines(failure):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
