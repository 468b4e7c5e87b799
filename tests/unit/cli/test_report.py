import io

from rich.console import Console

from gymrl.benchmark.summary import FailureSummary, RunSummary, SourceSummary
from gymrl.cli.report import failure_lines, print_summary, source_cells, timing_line
from gymrl.types import Failure, FailureKind


def source(**changes):
    values = {
        "source": "chain_sum",
        "prompts": 8,
        "rows": 32,
        "failed": 2,
        "passed": 10,
        "mean_reward": 1 / 3,
        "mixed_groups": 5,
        "prompt_tokens": 1200,
        "generated_tokens": 700,
        "turns": 45,
        "max_turns": 2,
        "truncated": 3,
    }
    return SourceSummary(**(values | changes))


def failure(message="the server said no", **facts):
    return Failure(kind=FailureKind.DATA, error="GymRequestError", message=message, **facts)


def test_a_source_is_one_line_of_cells():
    assert source_cells(source()) == [
        "chain_sum", "8", "32", "2", "33.3%", "0.333", "5 of 8", "1,900", "700", "1.5", "3",
    ]  # fmt: skip


def test_a_source_whose_rows_all_failed_shows_no_numbers_for_them():
    cells = source_cells(source(failed=32, mean_reward=None, turns=0))
    assert cells[4:6] == ["-", "-"]
    assert cells[9] == "-"


def test_a_failure_class_shows_its_count_and_one_example_with_its_place():
    lines = failure_lines(FailureSummary("GymRequestError", 3, failure(row=4, status=422)))
    assert lines == [
        "GymRequestError (data): 3 rows",
        "    e.g. row 4, status 422: the server said no",
    ]


def test_a_long_example_is_cut_and_says_so():
    (_, example) = failure_lines(FailureSummary("X", 1, failure("x" * 1000)))
    assert example.endswith("(600 more characters)")


def test_timing_shares_follow_the_time():
    summary = RunSummary(
        sources=(source(),),
        failures=(),
        timings={"timing/rollout/total": 4.0, "timing/rollout/await_results": 3.0},
        seconds=7.0,
    )
    assert timing_line(summary) == (
        "time: 7.0 s, 100.0 sampled tokens/s; of the rollout call: await_results 75%"
    )


def test_the_whole_report_holds_the_table_and_the_failures():
    stream = io.StringIO()
    summary = RunSummary(
        sources=(source(),),
        failures=(FailureSummary("GymRequestError", 2, failure("no [such] tool")),),
        timings={},
        seconds=1.0,
    )
    print_summary(Console(file=stream, width=160), summary)
    text = stream.getvalue()
    assert "task source" in text
    assert "failed rows: 2" in text
    assert "no [such] tool" in text


def test_a_narrow_terminal_loses_no_number():
    stream = io.StringIO()
    summary = RunSummary(sources=(source(),), failures=(), timings={}, seconds=1.0)
    print_summary(Console(file=stream, width=60), summary)
    text = stream.getvalue()
    assert "groups with differing rewards" in text
    for cell in source_cells(source()):
        assert cell in text
    assert "…" not in text


def test_a_run_whose_groups_were_all_dropped_has_no_empty_table():
    stream = io.StringIO()
    failures = (FailureSummary("GymRequestError", 2, failure()),)
    summary = RunSummary(sources=(), failures=failures, timings={}, seconds=1.0)
    print_summary(Console(file=stream, width=160), summary)
    assert "task source" not in stream.getvalue()
    assert "failed rows: 2" in stream.getvalue()


def test_names_with_brackets_and_terminal_codes_are_shown_as_they_are():
    name, agent = "gpqa[/diamond] \x1b[31m", "\x1b]0;title\x07"
    for width in (200, 60):
        console = Console(file=io.StringIO(), width=width)
        counted = FailureSummary("GymRequestError", 1, failure(agent=agent))
        summary = RunSummary(
            sources=(source(source=name),), failures=(counted,), timings={}, seconds=1.0
        )
        print_summary(console, summary)
        shown = console.file.getvalue()
        assert "\x1b" not in shown
        assert r"agent \x1b]0;title\x07" in shown
        assert "gpqa[/diamond]" in shown
