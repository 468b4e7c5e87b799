"""``gymrl eval report``: one evaluation in numbers, or two compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from gymrl.cli.consoles import configure_logging, error_console, output_console
from gymrl.cli.eval_tables import print_comparison, print_report
from gymrl.errors import ConfigError
from gymrl.evaluation import compare, read_evaluation, report_evaluation
from gymrl.evaluation.journal import write_whole
from gymrl.evaluation.markdown import comparison_markdown, report_markdown
from gymrl.evaluation.plots import plot_comparison, plot_evaluation

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.evaluation import Evaluation


class ReportOptions(msgspec.Struct, kw_only=True, frozen=True):
    """How a report is given out."""

    form: str = "table"
    output: Path | None = None
    plots: Path | None = None
    pass_reward: float = 1.0
    confidence: float = 0.95
    common: bool = False


def report_command(directories: tuple[Path, ...], options: ReportOptions) -> int:
    """Report on one directory, or compare two."""
    configure_logging(error_console(), verbose=False)
    if not 0 < options.confidence < 1:
        raise ConfigError(
            f"--confidence {options.confidence}: must be between 0 and 1", setting="--confidence"
        )
    if len(directories) == 1:
        _report(read_evaluation(directories[0]), options)
    elif len(directories) == 2:
        before, after = (read_evaluation(directory) for directory in directories)
        _compare(before, after, options)
    else:
        raise ConfigError("name one directory, or two to compare", setting="DIRECTORY")
    return 0


def _report(evaluation: Evaluation, options: ReportOptions) -> None:
    report = report_evaluation(
        evaluation, pass_reward=options.pass_reward, confidence=options.confidence
    )
    if not _is_written(report.to_json, lambda: report_markdown(report), options):
        print_report(output_console(), report)
    if options.plots is not None:
        _tell(plot_evaluation(evaluation, options.plots, report))


def _compare(before: Evaluation, after: Evaluation, options: ReportOptions) -> None:
    comparison = compare(before, after, common_only=options.common, confidence=options.confidence)
    if not _is_written(comparison.to_json, lambda: comparison_markdown(comparison), options):
        print_comparison(output_console(), comparison)
    if options.plots is not None:
        _tell(plot_comparison(comparison, options.plots))


def _is_written(
    as_json: Callable[[], str], as_markdown: Callable[[], str], options: ReportOptions
) -> bool:
    """Write or print the form that was asked for; False where that is the table."""
    if options.form == "table":
        if options.output is not None:
            raise ConfigError(
                "--output takes a report as json or markdown: add --format", setting="--output"
            )
        return False
    text = as_json() if options.form == "json" else as_markdown()
    if options.output is None:
        typer.echo(text, nl=False)
    else:
        write_whole(options.output, text.encode())
    return True


def _tell(written: list[Path]) -> None:
    for path in written:
        typer.echo(f"{path} written", err=True)
