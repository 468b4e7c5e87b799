"""Files in which the rows of groups are mixed: an evaluation's, several writers' lines merged."""

import logging
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import RowValueError
from gymrl.records import RowRecord, RunRecord, SamplingRecord, TrajectoryRecord, read_groups
from gymrl.records.grouping import GroupAssembler, Place, RowHead
from gymrl.types import Failure, FailureKind, Reward, Turn


def line(group, attempt, reward=1.0, *, size=2, run="a", benchmark="", digest=None, **fields):
    """A row; a reward of None is a failure."""
    trajectory = failure = None
    if reward is None:
        failure = Failure(kind=FailureKind.INFRA, error="RolloutTimeout", message="too late")
    else:
        trajectory = TrajectoryRecord(
            agent="agent",
            token_ids=[1, 2, 3],
            logprobs=[0.0, 0.0, -0.5],
            turns=(Turn(start=0, generation_start=2, end=3),),
            reward=Reward(reward),
        )
    return RowRecord(
        group=group,
        group_size=size,
        index=group * size + attempt,
        task_index=group,
        rollout_index=attempt,
        route="agent",
        rollout_id=f"{run}-{group}-{attempt}",
        task_digest=digest or f"sha256:{group}",
        sampling=SamplingRecord(),
        trajectory=trajectory,
        failure=failure,
        benchmark=benchmark,
        **fields,
    )


def graded(group, attempt, reward=1.0, **fields):
    """A row of an evaluation."""
    return line(group, attempt, reward, benchmark="math", **fields)


@pytest.fixture
def read(tmp_path):
    """The groups of a file with these lines: (index, rewards by attempt, None for a failure)."""

    def make(*rows, tail=b""):
        path = write(tmp_path / "rollouts.jsonl", rows, tail)
        return [told(group) for group in read_groups(path)]

    return make


def write(path, rows, tail=b""):
    lines = [msgspec.json.encode(row) for row in (RunRecord(), *rows)]
    path.write_bytes(b"\n".join(lines) + b"\n" + tail)
    return path


def told(group):
    return group.index, [
        None if isinstance(sample, Failure) else sample.reward.total for sample in group.samples
    ]


def test_interleaved_groups_come_in_the_order_of_their_last_rows(read):
    rows = [line(0, 0, 0.0), line(1, 1, 0.3), line(1, 0, 0.2), line(0, 1, 0.1)]
    assert read(*rows) == [(1, [0.2, 0.3]), (0, [0.0, 0.1])]


def test_the_rows_of_an_evaluation_come_as_they_end(read):
    rows = [graded(0, 1, 0.1), graded(1, 0, 0.2), graded(0, 0, 0.0), graded(1, 1, 0.3)]
    assert read(*rows) == [(0, [0.0, 0.1]), (1, [0.2, 0.3])]


def test_a_failure_gives_way_to_the_attempt_that_was_made_again(read):
    rows = [graded(0, 0, None), graded(0, 1, 0.5), graded(1, 0), graded(1, 1)]
    again = [graded(0, 0, None, run="b"), graded(0, 0, 1.0, run="c")]
    assert read(*rows, *again) == [(1, [1.0, 1.0]), (0, [1.0, 0.5])]


def test_an_attempt_that_failed_each_time_keeps_its_last_failure(read):
    assert read(graded(0, 0, None), graded(0, 1), graded(0, 0, None, run="b")) == [(0, [None, 1.0])]


def test_a_result_is_not_replaced_by_what_comes_after_it(read):
    rows = [graded(0, 0, 1.0), graded(0, 0, 0.0, run="b"), graded(0, 1, None)]
    assert read(*rows) == [(0, [1.0, None])]


def test_a_task_whose_place_and_repeats_changed_as_its_plan_grew_is_one_group(read):
    before = [graded(0, attempt, digest="sha256:t") for attempt in (0, 1)]
    after = [graded(3, attempt, 0.0, size=4, digest="sha256:t") for attempt in (3, 2)]
    assert read(*before, *after) == [(3, [1.0, 1.0, 0.0, 0.0])]


def test_two_benchmarks_with_the_same_task_are_two_groups(read):
    rows = [
        line(0, attempt, reward, benchmark=benchmark, digest="sha256:t")
        for attempt in (0, 1)
        for benchmark, reward in (("easy", 1.0), ("hard", 0.0))
    ]
    assert read(*rows) == [(0, [1.0, 1.0]), (0, [0.0, 0.0])]


def test_a_group_that_never_completes_is_told(read, caplog):
    with caplog.at_level(logging.WARNING):
        assert read(graded(0, 0), graded(1, 0), graded(1, 1), graded(2, 1)) == [(1, [1.0, 1.0])]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "2 groups lack rows and are left out" in message
    assert "group 0 (1 of 2 rows), group 2 (1 of 2 rows)" in message


def test_of_many_lost_groups_the_first_are_named_and_all_are_counted(read, caplog):
    with caplog.at_level(logging.WARNING):
        assert read(*(line(group, 0) for group in range(9))) == []
    assert "9 groups lack rows" in caplog.text
    assert "group 4 (1 of 2 rows), ..." in caplog.text


def test_a_torn_last_line_costs_its_group_alone(read, caplog):
    torn = msgspec.json.encode(line(1, 1))[:-9]
    with caplog.at_level(logging.WARNING):
        assert read(line(1, 0), line(0, 0), line(0, 1), tail=torn) == [(0, [1.0, 1.0])]
    assert "the last line is torn" in caplog.text
    assert "1 groups lack rows" in caplog.text


def test_a_group_number_that_comes_again_is_another_group(read):
    first = [line(0, 0, None), line(0, 1, 0.1)]
    second = [line(0, 0, 0.2, run="b"), line(0, 1, 0.3, run="b")]
    assert read(*first, *second) == [(0, [None, 0.1]), (0, [0.2, 0.3])]


def test_a_group_that_a_kill_cut_short_does_not_mix_with_its_next_run(read, caplog):
    with caplog.at_level(logging.WARNING):
        assert read(line(0, 0, 0.9), line(0, 0, 0.2, run="b"), line(0, 1, 0.3, run="b")) == [
            (0, [0.2, 0.3])
        ]
    assert "1 groups lack rows" in caplog.text


def test_rows_of_two_runs_in_one_file_are_not_mixed(tmp_path, caplog):
    path = write(tmp_path / "r.jsonl", [line(0, 0)])
    other = write(tmp_path / "other.jsonl", [line(0, 1), line(1, 0), line(1, 1)])
    with path.open("ab") as file:
        file.write(other.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert [told(group) for group in read_groups(path)] == [(1, [1.0, 1.0])]
    assert "2 groups lack rows" in caplog.text


def test_a_line_that_is_no_whole_record_is_named(read):
    bad = msgspec.json.encode(line(0, 1)).replace(b'"agent":"agent"', b'"agent":7', 1)
    with pytest.raises(RowValueError, match=r"rollouts\.jsonl:3: not a record of rollouts"):
        read(line(0, 0), tail=bad + b"\n")


def test_metrics_and_timings_are_found_on_whichever_line_has_them(tmp_path):
    last = line(0, 1, metrics={"reward/mean": 0.5}, timings={"total": 2.0})
    (group,) = read_groups(write(tmp_path / "r.jsonl", [last, line(0, 0)]))
    assert (group.metrics, group.timings) == ({"reward/mean": 0.5}, {"total": 2.0})


def test_rows_that_nobody_measured_together_have_no_metrics(tmp_path):
    rows = [graded(0, attempt, metrics={"reward/mean": 1.0}) for attempt in (0, 1)]
    (group,) = read_groups(write(tmp_path / "r.jsonl", rows))
    assert (group.metrics, group.timings) == ({}, None)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_interleaving_of_whole_groups_gives_the_same_groups(
    tmp_path_factory, sizes, of_evaluation, order
):
    rows = [
        line(group, attempt, attempt / 4, size=size, benchmark="math" if of_evaluation else "")
        for group, size in enumerate(sizes)
        for attempt in range(size)
    ]
    expected = [(group, [n / 4 for n in range(size)]) for group, size in enumerate(sizes)]
    order.shuffle(rows)
    path = write(tmp_path_factory.mktemp("mixed") / "r.jsonl", rows)
    found = [told(group) for group in read_groups(path)]
    assert sorted(found) == expected
    last = {row.group: place for place, row in enumerate(rows)}
    assert [group for group, _ in found] == sorted(last, key=last.__getitem__)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=6), st.randoms())
def test_failures_before_a_result_change_nothing_whatever_lies_between(
    tmp_path_factory, tries, order
):
    """Each attempt fails some times, then has its result; attempts are mixed as they come."""
    left = {attempt: [None] * len(failed) + [attempt / 8] for attempt, failed in enumerate(tries)}
    rows = []
    while left:
        attempt = order.choice(sorted(left))
        reward = left[attempt].pop(0)
        rows.append(graded(0, attempt, reward, size=len(tries), run=f"run{len(rows)}"))
        if not left[attempt]:
            del left[attempt]
    path = write(tmp_path_factory.mktemp("again") / "r.jsonl", rows)
    assert [told(group) for group in read_groups(path)] == [
        (0, [attempt / 8 for attempt in range(len(tries))])
    ]


def test_a_line_that_waits_for_its_group_costs_a_few_hundred_bytes():
    heads = 20_000
    places = list(range(heads))
    random.Random(3).shuffle(places)
    assembler = GroupAssembler()
    tracemalloc.start()
    for number, place in enumerate(places, start=1):
        group, attempt = divmod(place, 4)
        head = RowHead(
            group=group,
            group_size=4,
            index=place,
            task_index=group,
            rollout_index=attempt,
            rollout_id=f"0123456789abcdef-{group}-{attempt}",
            task_digest=f"sha256:{group:064x}",
            benchmark="math",
        )
        assembler.add(head, Place(number, number * 100_000, 100_000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / heads < 700
    assert len(list(assembler.finish())) == heads // 4
