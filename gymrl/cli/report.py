"""A run's summary as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from gymrl.benchmark.summary import timing_shares
from gymrl.cli.consoles import printable

if TYPE_CHECKING:
    from rich.console import Console

    from gymrl.benchmark.summary import FailureSummary, RunSummary, SourceSummary

_SHARES_AT_MOST = 6
_EXAMPLE_CHARS = 400


def _ratio(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_HEADERS = (
    "task source",
    "prompts",
    "rows",
    "failed",
    "pass rate",
    "mean reward",
    "groups with differing rewards",
    "tokens",
    "sampled",
    "turns a row",
    "cut off",
)
_WIDE_TABLE = 122


def source_cells(source: SourceSummary) -> list[str]:
    """The cells of one source, as text, in the order of the columns."""
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


def summary_table(summary: RunSummary, width: int) -> Table:
    """One line a task source; where `width` has no room for that, one column a task source."""
    cells = [source_cells(source) for source in summary.sources]
    table = Table(show_edge=False, pad_edge=False)
    longest = max((len(names[0]) for names in cells), default=0)
    if width >= _WIDE_TABLE - len(_HEADERS[0]) + longest:
        table.add_column(_HEADERS[0], no_wrap=True)
        for header in _HEADERS[1:]:
            wrapped = header.replace("with ", "with\n").replace("turns ", "turns\n")
            table.add_column(wrapped, justify="right")
        for name, *numbers in cells:
            table.add_row(Text(printable(name)), *numbers)
        return table
    table.add_column(_HEADERS[0], no_wrap=True)
    for name, *_ in cells:
        table.add_column(Text(printable(name)), justify="right", overflow="fold")
    for place, header in enumerate(_HEADERS[1:], start=1):
        table.add_row(header, *(line[place] for line in cells))
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
    if summary.sources:
        console.print(summary_table(summary, console.width))
    console.print(timing_line(summary), markup=False, highlight=False, soft_wrap=True)
    if summary.failures:
        console.print(
            f"failed rows: {summary.num_failed}",
            markup=False,
            highlight=False,
        )
    for failure in summary.failures:
        for line in failure_lines(failure):
            console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
