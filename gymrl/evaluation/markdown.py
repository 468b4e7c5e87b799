"""Reports as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gymrl.evaluation.comparison import BenchmarkComparison, Comparison, SourceComparison
    from gymrl.evaluation.report import BenchmarkReport, EvaluationReport, SourceReport
    from gymrl.evaluation.statistics import Estimate

_LISTED = 20


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def signed(value: float | None) -> str:
    """A difference for people."""
    return "-" if value is None else f"{value:+.3f}"


def with_interval(estimate: Estimate | None, form: str = ".3f") -> str:
    """``0.312 [0.201, 0.423]``; without the brackets where no interval can be given."""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return format(estimate.mean, form)
    return f"{estimate.mean:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def labelled_sources(report: EvaluationReport) -> Iterator[tuple[str, SourceReport]]:
    """Each benchmark's name and numbers, and under it those of its sources where it has several."""
    for label, benchmark in report.benchmarks.items():
        yield label, benchmark.total
        if has_several_sources(benchmark):
            for source, numbers in benchmark.sources.items():
                yield f"- {source}", numbers


def has_several_sources(benchmark: BenchmarkReport | BenchmarkComparison) -> bool:
    """Whether a table by task source says more than the benchmark's own line."""
    return len(benchmark.sources) > 1


def report_markdown(report: EvaluationReport) -> str:
    """A report as a Markdown page."""
    level = f"{report.confidence:.0%}"
    lines = ["# Evaluation", "", *_settings(report), ""]
    if not report.complete:
        warning = (
            f"**Not complete**: {report.num_failed} rows failed and {report.num_missing} are "
            "missing. They have no reward and are in no number but their own."
        )
        lines += [warning, ""]
    header = (
        "benchmark", "tasks", "repeats", "scored", "failed", "missing",
        f"mean reward [{level}]", "passed", "truncated", "sampled tokens (mean, p95)", "turns",
    )  # fmt: skip
    lines += _table(header, (_row(name, numbers) for name, numbers in labelled_sources(report)))
    for label, benchmark in report.benchmarks.items():
        lines += ["", f"## {_cell(label)}", "", *_details(benchmark.total, level)]
    lines += ["", *_notes(report, level)]
    return "\n".join(lines) + "\n"


def _settings(report: EvaluationReport) -> list[str]:
    policy, sampling = report.settings["policy"], report.settings["sampling"]
    who = policy["model"] or policy["name"] or "the policy of the servers"
    how = ", ".join(f"{name} {value}" for name, value in sampling.items() if value is not None)
    return [
        f"- policy: {_cell(who)}",
        f"- sampling: {how or 'as the tasks say'}; seed {report.settings['seed']}",
        f"- configuration: `{report.config_digest}`",
    ]


def _row(name: str, numbers: SourceReport) -> list[str]:
    return [name, str(numbers.tasks), str(numbers.repeats), *source_cells(numbers)]


def source_cells(numbers: SourceReport) -> list[str]:
    """Scored, failed, missing, mean reward, passed, cut off, sampled tokens, turns; dashes for none."""
    tokens, turns = numbers.generated_tokens, numbers.turns
    return [
        f"{numbers.scored} of {numbers.rows}",
        str(numbers.failed),
        str(numbers.missing),
        with_interval(numbers.reward),
        str(numbers.passed),
        "-" if numbers.truncation_rate is None else f"{numbers.truncation_rate:.1%}",
        "-" if tokens is None else f"{tokens.mean:.1f}, {tokens.p95:.0f}",
        "-" if turns is None else f"{turns.mean:.1f}",
    ]


def pass_cells(numbers: SourceReport) -> Iterator[list[str]]:
    """A row for each k, ascending: k, pass@k, pass^k, and how many tasks are left out."""
    for at, hat in zip(numbers.pass_at, numbers.pass_hat, strict=True):
        yield [
            str(at.k),
            with_interval(at.estimate),
            with_interval(hat.estimate),
            str(at.left_out),
        ]


def _details(numbers: SourceReport, level: str) -> Iterator[str]:
    header = ("k", f"pass@k [{level}]", f"pass^k [{level}]", "tasks left out")
    yield from _table(header, pass_cells(numbers))
    if numbers.components:
        yield ""
        yield from _table(
            ("component", "mean", "rows"),
            (
                [name, number(held.mean), str(held.rows)]
                for name, held in numbers.components.items()
            ),
        )
    if numbers.without_tokens:
        yield ""
        yield f"{numbers.without_tokens} rows have no tokens on record."
    if numbers.failures:
        yield ""
        yield from _table(
            ("failure", "rows", "first"),
            ([held.error, str(held.rows), held.example] for held in numbers.failures),
        )


def _notes(report: EvaluationReport, level: str) -> Iterator[str]:
    yield (
        f"Brackets: {level} intervals over tasks (Student's t; for rewards clustered by task), left "
        "out where tasks show no spread. A row passes when its verifier's reward is at least "
        f"{report.pass_reward:g}. pass@k is the unbiased estimate of Chen et al. (2021), pass^k "
        "that of Yao et al. (2024); tasks with fewer than k results are left out and counted."
    )
    if report.duplicates or report.foreign:
        yield ""
        yield (
            f"Passed over: {report.duplicates} lines of rows that had their result, "
            f"{report.foreign} lines of rows that are not in the plan."
        )


def comparison_markdown(comparison: Comparison) -> str:
    """A comparison as a Markdown page."""
    level = f"{comparison.confidence:.0%}"
    lines = [
        "# Comparison",
        "",
        f"- A: {_cell(comparison.before)}",
        f"- B: {_cell(comparison.after)}",
        *(f"- {_cell(line)}" for line in comparison.settings),
        *(f"- benchmark {_cell(label)} is only in A" for label in comparison.only_before),
        *(f"- benchmark {_cell(label)} is only in B" for label in comparison.only_after),
        "",
    ]
    header = (
        "benchmark", "tasks", "A", "B", f"B - A [{level}]", "better", "worse", "same", "sign test p",
    )  # fmt: skip
    rows = [_compared(name, found) for name, found in compared_sources(comparison)]
    lines += _table(header, rows)
    for label, benchmark in comparison.benchmarks.items():
        lines += _task_lists(_cell(label), benchmark)
    note = (
        f"One number a task, the mean of its rewards; B - A with its {level} interval is the mean "
        "of the tasks' differences (Student's t, paired). Tasks without a reward in A or in B are "
        "not compared."
    )
    lines += ["", note]
    return "\n".join(lines) + "\n"


def compared_sources(comparison: Comparison) -> Iterator[tuple[str, SourceComparison]]:
    """Each benchmark's name and numbers, and under it those of its sources where it has several."""
    for label, benchmark in comparison.benchmarks.items():
        yield label, benchmark.total
        if has_several_sources(benchmark):
            for source, numbers in benchmark.sources.items():
                yield f"- {source}", numbers


def _compared(name: str, found: SourceComparison) -> list[str]:
    return [name, str(found.better + found.worse + found.same), *compared_cells(found)]


def compared_cells(found: SourceComparison) -> list[str]:
    """A, B, B - A, how many tasks are better, worse and the same, and the sign test's p."""
    return [
        number(found.before),
        number(found.after),
        with_interval(found.difference, "+.3f"),
        str(found.better),
        str(found.worse),
        str(found.same),
        f"{found.p_value:.3g}",
    ]


def _task_lists(label: str, benchmark: BenchmarkComparison) -> Iterator[str]:
    for what, tasks in (("better", benchmark.better), ("worse", benchmark.worse)):
        if not tasks:
            continue
        yield from ("", f"## {label}: {what} in B", "")
        yield from _table(
            ("task", "A", "B", "B - A"),
            (
                [task.task_id, number(task.before), number(task.after), signed(task.difference)]
                for task in tasks[:_LISTED]
            ),
        )
        if len(tasks) > _LISTED:
            yield from ("", f"... and {len(tasks) - _LISTED} more.")
    for what, names in (
        ("only in A", benchmark.only_before),
        ("only in B", benchmark.only_after),
        ("with another input", benchmark.changed),
        ("without a reward in A or B", benchmark.unscored),
    ):
        if names:
            shown = ", ".join(names[:_LISTED])
            more = f", ... ({len(names) - _LISTED} more)" if len(names) > _LISTED else ""
            yield from ("", f"{label}: {len(names)} tasks {what}: {_cell(shown)}{more}")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(_cell(cell) for cell in row)} |"


def _cell(text: str) -> str:
    """Text that cannot end a cell or a line."""
    return " ".join(text.split()).replace("|", "\\|")
