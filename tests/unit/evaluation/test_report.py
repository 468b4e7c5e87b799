import io
import json
import logging
import math

import pytest
from rich.console import Console

from gymrl.cli.eval_tables import print_report
from gymrl.errors import ConfigError
from gymrl.evaluation import read_evaluation, report_evaluation
from gymrl.evaluation.journal import Journal
from gymrl.evaluation.markdown import report_markdown
from gymrl.types import Reward


@pytest.fixture
def write(tmp_path, make_record):
    """Write rows: `rewards[task id]` is a reward a repeat, None for a failure, ... for no line."""

    def make(plan, rewards, **fields):
        with Journal(tmp_path, plan) as journal:
            for task in plan.tasks():
                for repeat, reward in enumerate(rewards.get(task.task_id, ())):
                    if reward is not ...:
                        journal.add(make_record(task, repeat, reward, **fields))
        return read_evaluation(tmp_path)

    return make


REWARDS = {"t1": [1.0, 0.0], "t2": [1.0, None], "t3": [0.0, ...]}


def test_failed_and_missing_rows_are_counted_and_enter_no_mean(make_plan, write):
    report = report_evaluation(write(make_plan(), REWARDS))
    total = report.benchmarks["math"].total
    assert (total.rows, total.scored, total.failed, total.missing) == (6, 4, 1, 1)
    assert total.reward.mean == 0.5
    assert total.passed == 2
    assert (report.complete, report.num_failed, report.num_missing) == (False, 1, 1)
    (failure,) = total.failures
    assert (failure.error, failure.rows, failure.example) == ("RolloutTimeout", 1, "too late")


def test_the_interval_is_clustered_by_task(make_plan, write):
    # t1 [1, 0], t2 [1], t3 [0]; mean 1/2; residual sums 0, 1/2, -1/2;
    # standard error sqrt(3/2 * 1/2) / 4 = 0.2165; t(2) = 4.30265.
    reward = report_evaluation(write(make_plan(), REWARDS)).benchmarks["math"].total.reward
    assert reward.standard_error == pytest.approx(math.sqrt(0.75) / 4)
    assert reward.high == pytest.approx(0.5 + 4.30265 * math.sqrt(0.75) / 4, abs=1e-4)
    assert (reward.tasks, reward.values) == (3, 4)


def test_pass_at_k_leaves_out_tasks_with_too_few_results_and_says_so(make_plan, write):
    total = report_evaluation(write(make_plan(), REWARDS)).benchmarks["math"].total
    one, two = total.pass_at
    # pass@1: t1 1/2, t2 1, t3 0. pass@2: t1 alone.
    assert (one.k, one.estimate.mean, one.left_out) == (1, 0.5, 0)
    assert (two.k, two.estimate.mean, two.left_out) == (2, 1.0, 2)
    assert total.pass_hat[1].estimate.mean == 0.0


def test_a_run_without_any_result_has_no_numbers_and_no_zeros(make_plan, write):
    report = report_evaluation(write(make_plan(), {"t1": [None, None]}))
    total = report.benchmarks["math"].total
    assert (total.reward, total.truncation_rate, total.generated_tokens) == (None, None, None)
    assert (total.scored, total.failed, total.missing, total.unscored_tasks) == (0, 2, 4, 3)
    assert [each.estimate for each in total.pass_at] == [None, None]
    assert "| math | 3 | 2 | 0 of 6 | 2 | 4 | - |" in report_markdown(report)


def test_what_passes_is_the_callers_to_say(make_plan, write):
    evaluation = write(make_plan(tasks=("t1",)), {"t1": [0.6, 0.4]})
    assert report_evaluation(evaluation).benchmarks["math"].total.passed == 0
    lenient = report_evaluation(evaluation, pass_reward=0.5)
    assert lenient.benchmarks["math"].total.passed == 1
    assert lenient.benchmarks["math"].total.pass_at[0].estimate.mean == 0.5


def test_lengths_truncation_and_components_are_reported(make_plan, write):
    reward = Reward(0.75, {"form": 0.25, "answer": 0.5})
    total = (
        report_evaluation(
            write(
                make_plan(tasks=("t1",)),
                {"t1": [reward, reward]},
                tokens=7,
                incomplete_reason="max_output_tokens",
                truncated_prefix=True,
            )
        )
        .benchmarks["math"]
        .total
    )
    assert (total.truncated, total.truncation_rate, total.broken_prefixes) == (2, 1.0, 2)
    tokens = total.generated_tokens
    assert (tokens.mean, tokens.median, tokens.p95, tokens.max) == (7, 7, 7, 7)
    assert (total.total_tokens.max, total.turns.max) == (9, 1)
    assert {name: (c.mean, c.rows) for name, c in total.components.items()} == {
        "answer": (0.5, 2),
        "form": (0.25, 2),
    }


@pytest.mark.parametrize(
    ("result", "total_tokens", "generated"),
    [
        (b'{"response":{"usage":{"input_tokens":30,"output_tokens":12}}}', 42, 12),
        (b'{"response":{"usage":{"output_tokens":12}}}', None, 12),
        (b'{"response":{"usage":null}}', None, None),
        (b'{"response":{"usage":"much"}}', None, None),
        (b"{}", None, None),
    ],
)
def test_rows_without_tokens_are_as_long_as_their_server_says(
    make_plan, write, result, total_tokens, generated
):
    evaluation = write(
        make_plan(tasks=("t1",)), {"t1": [1.0, 0.0]}, placeholder=True, result=result
    )
    total = report_evaluation(evaluation).benchmarks["math"].total
    assert (total.scored, total.without_tokens, total.turns) == (2, 2, None)
    assert (total.total_tokens and total.total_tokens.mean) == total_tokens
    assert (total.generated_tokens and total.generated_tokens.mean) == generated
    assert "2 rows have no tokens on record" in report_markdown(report_evaluation(evaluation))


def test_another_reason_than_a_limit_is_no_truncation(make_plan, write):
    evaluation = write(
        make_plan(tasks=("t1",)), {"t1": [1.0, 1.0]}, incomplete_reason="content_filter"
    )
    assert report_evaluation(evaluation).benchmarks["math"].total.truncated == 0


def test_every_task_source_has_numbers_of_its_own(make_benchmark, make_plan, write):
    def row(task_id, source):
        return {
            "task_id": task_id,
            "task_source": source,
            "responses_create_params": {"input": task_id},
        }

    tasks = (row("t1", "easy"), row("t2", "hard"), row("t3", "easy"))
    plan = make_plan(make_benchmark("math", tasks, repeats=1))
    report = report_evaluation(write(plan, {"t1": [1.0], "t2": [0.0], "t3": [0.5]}))
    sources = report.benchmarks["math"].sources
    assert {name: s.reward.mean for name, s in sources.items()} == {"easy": 0.75, "hard": 0.0}
    assert "| - hard | 1 |" in report_markdown(report)


def test_one_task_in_two_benchmarks_is_two(make_benchmark, make_plan, write, tmp_path, make_record):
    row = {"task_id": "t1", "task_source": "s", "responses_create_params": {"input": "1"}}
    plan = make_plan(make_benchmark("a", (row,), 1), make_benchmark("b", (row,), 1))
    first, second = plan.tasks()
    with Journal(tmp_path, plan) as journal:
        journal.add(make_record(first, 0, 1.0))
        journal.add(make_record(second, 0, 0.0))
    report = report_evaluation(read_evaluation(tmp_path))
    assert report.benchmarks["a"].total.reward.mean == 1.0
    assert report.benchmarks["b"].total.reward.mean == 0.0


def test_rows_of_another_plan_and_duplicates_are_counted_not_used(
    make_plan, make_benchmark, tmp_path, make_record
):
    plan = make_plan(tasks=("t1",), repeats=1)
    (task,) = plan.tasks()
    (other,) = make_plan(make_benchmark("elsewhere", ("t9",))).tasks()
    with Journal(tmp_path, plan) as journal:
        journal.add(make_record(task, 0, 1.0, rollout_id="first"))
        journal.add(make_record(task, 0, 0.0, rollout_id="second"))
        journal.add(make_record(task, 5, 0.0))
        journal.add(make_record(other, 0, 0.0))
    report = report_evaluation(read_evaluation(tmp_path))
    assert report.benchmarks["math"].total.reward.mean == 1.0
    assert (report.duplicates, report.foreign, report.complete) == (1, 2, True)
    assert "1 lines of rows that had their result, 2 lines" in report_markdown(report)


def test_a_file_that_is_being_written_can_be_read(make_plan, write, tmp_path, caplog):
    write(make_plan(), {"t1": [1.0, 1.0]})
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    with caplog.at_level(logging.WARNING):
        report = report_evaluation(read_evaluation(tmp_path))
    assert report.benchmarks["math"].total.scored == 1
    assert "torn" in caplog.text


def test_a_whole_last_line_without_its_newline_counts(make_plan, write, tmp_path):
    write(make_plan(), {"t1": [1.0, 1.0]})
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert report_evaluation(read_evaluation(tmp_path)).benchmarks["math"].total.scored == 2


def test_unknown_fields_of_lines_are_passed_over(make_plan, write, tmp_path):
    write(make_plan(tasks=("t1",)), {"t1": [1.0, 0.0]})
    path = tmp_path / "rollouts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["colour"] = {"of": "the future"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report_evaluation(read_evaluation(tmp_path)).complete


def test_a_newer_schema_and_another_configuration_are_refused(make_plan, write, tmp_path):
    write(make_plan(), {})
    path = tmp_path / "rollouts.jsonl"
    header = path.read_text()
    path.write_text(header.replace('"schema":1', '"schema":99'))
    with pytest.raises(ConfigError, match="schema 99"):
        read_evaluation(tmp_path)
    path.write_text(header.replace("sha256:", "sha256:0"))
    with pytest.raises(ConfigError, match="another configuration"):
        read_evaluation(tmp_path)


def test_a_directory_without_an_evaluation_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no evaluation: there is no plan\.json"):
        read_evaluation(tmp_path)


def test_a_report_is_json_with_its_schema(make_plan, write):
    plain = json.loads(report_evaluation(write(make_plan(), REWARDS)).to_json())
    assert plain["schema"] == "gymrl.benchmark-metrics.v1"
    assert plain["benchmarks"]["math"]["total"]["failed"] == 1


def test_a_markdown_page_says_what_is_not_there(make_plan, write):
    page = report_markdown(report_evaluation(write(make_plan(), REWARDS)))
    assert "**Not complete**: 1 rows failed and 1 are missing" in page
    assert "| math | 3 | 2 | 4 of 6 | 1 | 1 | 0.500 [-0.432, 1.432] |" in page
    assert "| 2 | 1.000 | 0.000 | 2 |" in page
    assert "| RolloutTimeout | 1 | too late |" in page


def test_blank_lines_that_an_editor_left_are_passed_over(make_plan, write, tmp_path, make_record):
    plan = make_plan(tasks=("t1",), repeats=2)
    write(plan, {"t1": [1.0]})
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"\n" + path.read_bytes().replace(b"\n", b"\r\n\r\n") + b"  \n")
    with Journal(tmp_path, plan) as journal:
        ((pending,),) = journal.pending(3)
        journal.add(make_record(pending.task, pending.repeat))
    assert read_evaluation(tmp_path).tasks[0].rewards == [1.0, 1.0]


def test_a_table_and_a_page_show_labels_and_messages_as_they_are(make_benchmark, make_plan, write):
    label = "a|b[/red]\n\x1b[31m"
    plan = make_plan(make_benchmark(label, ("t1",), 1))
    report = report_evaluation(write(plan, {"t1": [None]}, error="Odd\x1b[2J"))
    console = Console(file=io.StringIO(), width=200)
    print_report(console, report)
    shown = console.file.getvalue()
    assert "\x1b" not in shown
    assert r"a|b[/red]\n\x1b[31m" in shown
    assert "## a\\|b[/red]" in report_markdown(report)
