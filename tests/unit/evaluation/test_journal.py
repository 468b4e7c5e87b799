import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymrl.errors import ConfigError, OutputError, RowValueError
from gymrl.evaluation import EvaluationSettings, SamplingSettings, read_evaluation
from gymrl.evaluation.journal import Journal
from gymrl.records import read_groups
from gymrl.types import Failure, FailureKind, RolloutGroup, Row


def keys_of(pending):
    return [(row.task.task_id, row.repeat) for rows in pending for row in rows]


def single(pending):
    """The rows that are made one by one."""
    return [row for (row,) in pending]


def run_all(directory, plan, make_record, max_tries=3, reward=1.0):
    """What a run does with a directory, with attempts that cost nothing."""
    with Journal(directory, plan) as journal:
        for number, row in enumerate(single(journal.pending(max_tries))):
            name = f"{row.task.task_id}-{row.repeat}-{row.tries}-{number}"
            journal.add(make_record(row.task, row.repeat, reward, rollout_id=name))


def lines_of(directory):
    return [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]


def attempts_of(directory):
    """Rows of a file by task and repeat; a list, so that a duplicate would show."""
    rows = [line for line in lines_of(directory) if line["record"] == "row"]
    return sorted((row["task_id"], row["rollout_index"]) for row in rows)


ALL = [(task, repeat) for repeat in (0, 1) for task in ("t1", "t2", "t3")]


def test_a_new_directory_gets_every_task_once_and_then_again(tmp_path, make_plan):
    with Journal(tmp_path / "new" / "run", make_plan()) as journal:
        assert keys_of(journal.pending(3)) == ALL
        assert journal.num_finished == 0


def test_finished_rows_are_not_run_again(tmp_path, make_plan, make_record):
    plan = make_plan()
    with Journal(tmp_path, plan) as journal:
        first, second, *_ = single(journal.pending(3))
        journal.add(make_record(first.task, first.repeat, 0.0))
        journal.add(make_record(second.task, second.repeat, 1.0))

    with Journal(tmp_path, plan) as journal:
        assert keys_of(journal.pending(3)) == ALL[2:]
        assert journal.num_finished == 2


def test_half_a_last_line_is_dropped_with_a_warning_and_its_row_run_again(
    tmp_path, make_plan, make_record, caplog
):
    # NVIDIA-NeMo/Gym#252, #2750: killed after 5 of 8 rows, the last line half-written.
    plan = make_plan(tasks=("t1", "t2", "t3", "t4"))
    with Journal(tmp_path, plan) as journal:
        for row in single(journal.pending(3))[:6]:
            journal.add(make_record(row.task, row.repeat))
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(path.read_bytes()[:-40])

    with caplog.at_level(logging.WARNING), Journal(tmp_path, plan) as journal:
        again = keys_of(journal.pending(3))
    assert again == [("t2", 1), ("t3", 1), ("t4", 1)]
    assert "torn" in caplog.text

    run_all(tmp_path, plan, make_record)
    assert attempts_of(tmp_path) == sorted((t, r) for t in ("t1", "t2", "t3", "t4") for r in (0, 1))


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_prefix_of_the_file_continued_gives_the_same_rows(make_plan, make_record, data):
    plan = make_plan()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        run_all(directory, plan, make_record)
        whole = (directory / "rollouts.jsonl").read_bytes()
        kept = data.draw(st.integers(0, len(whole)))
        (directory / "rollouts.jsonl").write_bytes(whole[:kept])

        logging.disable(logging.WARNING)
        try:
            run_all(directory, plan, make_record)
        finally:
            logging.disable(logging.NOTSET)

        assert attempts_of(directory) == sorted(ALL)
        assert [line["record"] for line in lines_of(directory)].count("run") == 1
        evaluation = read_evaluation(directory)
        assert evaluation.duplicates == 0
        assert [task.rewards for task in evaluation.tasks] == [[1.0, 1.0]] * 3


def test_failed_rows_are_tried_again_until_their_budget_is_spent(tmp_path, make_plan, make_record):
    plan = make_plan(tasks=("t1",), repeats=1)
    tried = []
    for _ in range(5):
        with Journal(tmp_path, plan) as journal:
            tried.append([row.tries for row in single(journal.pending(3))])
        run_all(tmp_path, plan, make_record, reward=None)
    assert tried == [[0], [1], [2], [], []]
    with Journal(tmp_path, plan) as journal:
        assert keys_of(journal.pending(4)) == [("t1", 0)]


def test_a_refused_connection_is_no_try(tmp_path, make_plan, make_record):
    plan = make_plan(tasks=("t1",), repeats=1)
    with Journal(tmp_path, plan) as journal:
        (row,) = single(journal.pending(1))
        journal.add(make_record(row.task, 0, None, failure_fields={"was_sent": False}))
    with Journal(tmp_path, plan) as journal:
        assert [row.tries for row in single(journal.pending(1))] == [0]


def test_a_row_that_failed_before_and_has_a_result_now_is_finished(
    tmp_path, make_plan, make_record
):
    plan = make_plan(tasks=("t1",), repeats=1)
    run_all(tmp_path, plan, make_record, reward=None)
    run_all(tmp_path, plan, make_record, reward=1.0)
    (task,) = read_evaluation(tmp_path).tasks
    assert (task.rewards, task.failed, task.missing) == ([1.0], {}, 0)


def test_a_line_that_stands_twice_is_one_try(tmp_path, make_plan, make_record):
    plan = make_plan(tasks=("t1",), repeats=1)
    run_all(tmp_path, plan, make_record, reward=None)
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[1])
    with Journal(tmp_path, plan) as journal:
        assert [row.tries for row in single(journal.pending(3))] == [1]
    assert read_evaluation(tmp_path).duplicates == 1


def test_another_configuration_is_refused_with_the_difference(tmp_path, make_plan, make_record):
    run_all(tmp_path, make_plan(), make_record)
    hotter = EvaluationSettings(sampling=SamplingSettings(temperature=0.5), seed=3)
    with pytest.raises(ConfigError) as caught:
        Journal(tmp_path, make_plan(settings=hotter)).open()
    assert "sampling.temperature: null -> 0.5" in caught.value.message
    assert "seed: 0 -> 3" in caught.value.message
    assert "throw away" in caught.value.message
    assert len(attempts_of(tmp_path)) == 6


def test_another_set_of_tasks_is_refused_with_their_names(tmp_path, make_plan, make_record):
    run_all(tmp_path, make_plan(), make_record)
    with pytest.raises(ConfigError) as caught:
        Journal(tmp_path, make_plan(tasks=("t1", "t4"), repeats=1)).open()
    for line in ("repeats: 2 -> 1", "1 tasks added: t4", "2 tasks removed: t2, t3"):
        assert line in caught.value.message


def test_a_task_whose_input_changed_is_refused(tmp_path, make_plan, make_record):
    run_all(tmp_path, make_plan(tasks=("t1",)), make_record)
    changed = {"task_id": "t1", "task_source": "math", "responses_create_params": {"input": "new"}}
    with pytest.raises(ConfigError, match="1 tasks changed in their input: t1"):
        Journal(tmp_path, make_plan(tasks=(changed,))).open()


def test_a_plan_may_grow_when_it_is_asked_to(tmp_path, make_plan, make_record):
    run_all(tmp_path, make_plan(tasks=("t1", "t2"), repeats=1), make_record)
    grown = make_plan()
    with pytest.raises(ConfigError, match="add what is new to it"):
        Journal(tmp_path, grown).open()
    with Journal(tmp_path, grown, extend=True) as journal:
        assert keys_of(journal.pending(3)) == [("t3", 0), ("t1", 1), ("t2", 1), ("t3", 1)]


def test_a_benchmark_may_be_added(tmp_path, make_benchmark, make_plan, make_record):
    run_all(tmp_path, make_plan(make_benchmark("math", ("t1",), 1)), make_record)
    grown = make_plan(make_benchmark("more", ("t2",), 1), make_benchmark("math", ("t1",), 1))
    with Journal(tmp_path, grown, extend=True) as journal:
        assert keys_of(journal.pending(3)) == [("t2", 0)]
    run_all(tmp_path, grown, make_record)
    assert attempts_of(tmp_path) == [("t1", 0), ("t2", 0)]
    assert [task.rewards for task in read_evaluation(tmp_path).tasks] == [[1.0], [1.0]]


def test_a_plan_does_not_shrink_by_extending(tmp_path, make_plan, make_record):
    run_all(tmp_path, make_plan(), make_record)
    with pytest.raises(ConfigError, match="another plan"):
        Journal(tmp_path, make_plan(tasks=("t1", "t2")), extend=True).open()


def test_a_directory_without_a_single_row_takes_another_plan(tmp_path, make_plan, make_record):
    run_all(tmp_path, make_plan(), make_record, max_tries=0)  # it did not get as far as a row
    other = make_plan(settings=EvaluationSettings(seed=1))
    run_all(tmp_path, other, make_record)
    assert [line["record"] for line in lines_of(tmp_path)] == ["run"] + ["row"] * 6
    assert lines_of(tmp_path)[0]["config_digest"] == other.config_digest


def test_the_images_of_a_row_lie_beside_the_file_and_go_when_it_begins_anew(
    tmp_path, make_plan, make_record
):
    image = b"\x89PNG"
    digest = hashlib.sha256(image).hexdigest()
    row = Row(
        index=0,
        task_index=0,
        rollout_index=0,
        route="math",
        rollout_id="r",
        body=b"{}",
        media={digest: image},
    )
    failure = Failure(kind=FailureKind.DATA, error="E", message="")
    group = RolloutGroup(index=0, task_index=0, rows=(row,), samples=(failure,))
    with Journal(tmp_path, make_plan()) as journal:
        (pending, *_) = single(journal.pending(3))
        journal.add(make_record(pending.task, pending.repeat), group=group)
    folder = tmp_path / f"{journal.path.name}.media"
    assert (folder / digest).read_bytes() == image
    with Journal(tmp_path, make_plan(), overwrite=True):
        assert not folder.exists()


def test_overwriting_is_explicit_and_begins_anew(tmp_path, make_plan, make_record):
    run_all(tmp_path, make_plan(), make_record)
    other = make_plan(tasks=("t9",), repeats=1)
    with Journal(tmp_path, other, overwrite=True) as journal:
        assert keys_of(journal.pending(3)) == [("t9", 0)]
    assert attempts_of(tmp_path) == []


def test_a_file_of_something_else_is_left_alone(tmp_path, make_plan):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("precious\n")
    with pytest.raises(ConfigError, match=r"without a plan\.json"):
        Journal(tmp_path, make_plan()).open()
    assert path.read_text() == "precious\n"


def test_a_broken_line_in_the_middle_is_named(tmp_path, make_plan, make_record):
    plan = make_plan()
    run_all(tmp_path, plan, make_record)
    path = tmp_path / "rollouts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{broken\n", *lines[3:]]))
    with pytest.raises(RowValueError, match=r"rollouts\.jsonl:3: not a record"):
        Journal(tmp_path, plan).open()
    with pytest.raises(RowValueError, match=r"rollouts\.jsonl:3: not a record"):
        read_evaluation(tmp_path)


def test_one_process_writes_at_a_time_and_is_named(tmp_path, make_plan):
    plan = make_plan()
    with Journal(tmp_path, plan):
        with pytest.raises(ConfigError, match=f"being written by process {os.getpid()} on"):
            Journal(tmp_path, plan).open()
    with Journal(tmp_path, plan) as journal:
        assert journal.num_finished == 0


def test_a_directory_that_cannot_be_made_is_a_message(tmp_path, make_plan):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        Journal(tmp_path / "file" / "run", make_plan()).open()


def test_a_closed_journal_takes_nothing(tmp_path, make_plan, make_record):
    journal = Journal(tmp_path, make_plan())
    journal.open()
    (row,) = next(journal.pending(3))
    journal.close()
    journal.close()
    with pytest.raises(OutputError, match="closed"):
        journal.add(make_record(row.task, row.repeat))


def compared(journal, task_id):
    """The rows of a task that are made together."""
    return next(rows for rows in journal.pending(3) if rows[0].task.task_id == task_id)


def add_cohort(journal, rows, make_record, cohort, reward=1.0, **fields):
    records = [
        make_record(
            row.task,
            row.repeat,
            reward,
            rollout_id=f"{cohort}-{row.repeat}",
            cohort=cohort,
            **fields,
        )
        for row in rows
    ]
    journal.add(*records)


def test_rows_that_are_compared_come_together_and_are_counted_apart(
    tmp_path, make_plan, make_record
):
    plan = make_plan(tasks=("t1", "t2"), repeats=4, group_size=2)
    with Journal(tmp_path, plan) as journal:
        found = [[(r.task.task_id, r.repeat) for r in rows] for rows in journal.pending(3)]
        assert found == [
            [("t1", 0), ("t1", 1)],
            [("t2", 0), ("t2", 1)],
            [("t1", 2), ("t1", 3)],
            [("t2", 2), ("t2", 3)],
        ]
        add_cohort(journal, compared(journal, "t2"), make_record, "a")
    with Journal(tmp_path, plan) as journal:
        assert keys_of(journal.pending(3)) == [
            ("t1", 0), ("t1", 1), ("t1", 2), ("t1", 3), ("t2", 2), ("t2", 3)
        ]  # fmt: skip
        assert journal.num_finished == 2


@pytest.mark.parametrize("whole_lines", [1, 2, 3])
def test_a_torn_cohort_is_made_again_and_never_mixed(tmp_path, make_plan, make_record, whole_lines):
    plan = make_plan(tasks=("t1",), repeats=3, group_size=3)
    with Journal(tmp_path, plan) as journal:
        add_cohort(journal, compared(journal, "t1"), make_record, "first", 0.25)
    path = tmp_path / "rollouts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: 1 + whole_lines]) + lines[-1][:50])

    (task,) = read_evaluation(tmp_path).tasks
    if whole_lines == 3:
        assert task.rewards == [0.25] * 3
        return
    assert (task.rewards, task.missing) == ([], 3)
    with Journal(tmp_path, plan) as journal:
        add_cohort(journal, compared(journal, "t1"), make_record, "second", 1.0)
        assert list(journal.pending(3)) == []
    (task,) = read_evaluation(tmp_path).tasks
    assert task.rewards == [1.0] * 3
    (group,) = read_groups(path)
    assert [sample.reward.total for sample in group.samples] == [1.0] * 3


def test_a_line_taken_out_of_a_cohort_costs_all_of_it(tmp_path, make_plan, make_record):
    plan = make_plan(tasks=("t1",), repeats=2, group_size=2)
    with Journal(tmp_path, plan) as journal:
        add_cohort(journal, compared(journal, "t1"), make_record, "first", 0.25)
    path = tmp_path / "rollouts.jsonl"
    run, _, kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(run + kept)
    with Journal(tmp_path, plan) as journal:
        assert keys_of(journal.pending(3)) == [("t1", 0), ("t1", 1)]


def test_a_cohort_that_failed_is_tried_again_within_its_budget(tmp_path, make_plan, make_record):
    plan = make_plan(tasks=("t1",), repeats=2, group_size=2)
    for name in ("first", "second"):
        with Journal(tmp_path, plan) as journal:
            add_cohort(journal, compared(journal, "t1"), make_record, name, None)
    with Journal(tmp_path, plan) as journal:
        assert [[row.tries for row in rows] for rows in journal.pending(3)] == [[2, 2]]
        assert list(journal.pending(2)) == []
    (task,) = read_evaluation(tmp_path).tasks
    assert [failed.tries for failed in task.failed.values()] == [2, 2]


def test_repeats_that_are_no_whole_cohorts_are_refused(make_plan):
    with pytest.raises(ConfigError, match="repeats=3: its verifier compares 2 attempts"):
        make_plan(repeats=3, group_size=2)
