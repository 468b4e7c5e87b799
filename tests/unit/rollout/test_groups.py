import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import (
    ActorDiedError,
    IncompleteStreamError,
    RowIndexTypeError,
    RowIndexValueError,
    RowTypeError,
    RowValueError,
)
from gymrl.rollout.groups import GroupAccumulator
from gymrl.types import Failure, FailureKind, Reward, Row, RowResult, Trajectory, Turn


def batch(num_rows, group_size=2):
    return [
        Row(
            index=index,
            task_index=index // group_size,
            rollout_index=index % group_size,
            route="math",
            rollout_id=f"r{index}",
            body=b"{}",
        )
        for index in range(num_rows)
    ]


def result(index, agent="math_agent", failed=False):
    outcome = Trajectory(
        agent=agent,
        token_ids=np.array([1, 2], dtype=np.int32),
        logprobs=np.array([0.0, -0.5], dtype=np.float32),
        turns=(Turn(start=0, generation_start=1, end=2),),
        reward=Reward(1.0),
    )
    if failed:
        outcome = Failure(kind=FailureKind.DATA, error="NoGenerationError", message="no turn")
    return RowResult(index=index, agent=agent, outcome=outcome)


def test_a_group_leaves_when_its_last_row_arrives_in_row_order():
    groups = GroupAccumulator(batch(6, 3), 3)
    assert [groups.add(result(index)) for index in (5, 0, 3)] == [None, None, None]
    completed = groups.add(result(4))
    assert completed.index == 1
    assert [row.index for row in completed.rows] == [3, 4, 5]
    assert [r.index for r in completed.results] == [3, 4, 5]
    assert not groups.is_complete
    assert groups.missing == [1, 2]


def test_a_group_that_was_handed_over_is_not_kept():
    groups = GroupAccumulator(batch(4), 2)
    assert groups.add(result(0)) is None
    last = result(1)
    watched = weakref.ref(last.outcome.token_ids)
    completed = groups.add(last)
    del last
    assert watched() is completed.results[1].outcome.token_ids
    del completed
    gc.collect()
    assert watched() is None
    with pytest.raises(RowIndexValueError, match="row 1 arrived twice"):
        groups.add(result(1))
    assert groups.missing == [2, 3]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 5), st.randoms())
def test_any_order_of_arrival_gives_every_row_once(num_groups, size, random):
    groups = GroupAccumulator(batch(num_groups * size, size), size)
    order = list(range(num_groups * size))
    random.shuffle(order)
    completed = [group for index in order if (group := groups.add(result(index)))]
    assert sorted(group.index for group in completed) == list(range(num_groups))
    assert sorted(r.index for group in completed for r in group.results) == sorted(order)
    assert groups.is_complete
    groups.finish()


@pytest.mark.parametrize("index", [True, False, 1.0, "1", None, np.bool_(True), np.float64(1)])
def test_an_index_that_is_no_integer_is_refused(index):
    groups = GroupAccumulator(batch(4), 2)
    with pytest.raises(RowIndexTypeError, match="an integer is needed") as caught:
        groups.add(result(index))
    assert isinstance(caught.value, TypeError)
    assert groups.missing == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [np.int64(1), np.int32(1), np.uint8(1)])
def test_an_integer_of_numpy_is_an_index(index):
    groups = GroupAccumulator(batch(4), 2)
    groups.add(result(index))
    assert groups.missing == [0, 2, 3]


@pytest.mark.parametrize("index", [-1, 4, 2**70])
def test_an_index_outside_the_batch_is_refused(index):
    with pytest.raises(RowIndexValueError, match="the batch has 0 to 3"):
        GroupAccumulator(batch(4), 2).add(result(index))


def test_a_row_that_arrives_twice_is_refused_before_and_after_its_group_left():
    groups = GroupAccumulator(batch(4), 2)
    groups.add(result(1))
    with pytest.raises(RowIndexValueError, match="row 1 arrived twice"):
        groups.add(result(1))
    assert groups.add(result(0)) is not None
    with pytest.raises(RowIndexValueError, match="row 0 arrived twice"):
        groups.add(result(0))


def test_a_group_is_served_by_one_agent():
    groups = GroupAccumulator(batch(4), 2)
    groups.add(result(0, "a"))
    groups.add(result(2, "b"))
    with pytest.raises(RowIndexValueError, match="row 0 was served by 'a', row 1 by 'b'"):
        groups.add(result(1, "b"))


def test_a_row_that_failed_early_may_not_know_its_agent():
    groups = GroupAccumulator(batch(2), 2)
    groups.add(result(0, "", failed=True))
    assert groups.add(result(1, "a")) is not None


def test_a_whole_batch_as_one_group_may_mix_agents_and_tasks():
    groups = GroupAccumulator(batch(4), 4, allow_mixed_agents=True)
    for index, agent in enumerate("aba"):
        groups.add(result(index, agent))
    assert groups.add(result(3, "c")) is not None


def test_mixed_agents_are_for_the_whole_batch_only():
    with pytest.raises(RowValueError, match="whole batch"):
        GroupAccumulator(batch(4), 2, allow_mixed_agents=True)


def test_rows_of_a_group_share_their_task_index():
    with pytest.raises(RowValueError, match="task indices 0 and 1"):
        GroupAccumulator(batch(4, 2), 4)


@pytest.mark.parametrize("size", [0, -1, 3])
def test_a_group_size_that_does_not_fit_is_refused(size):
    with pytest.raises(RowValueError):
        GroupAccumulator(batch(4), size)


@pytest.mark.parametrize("size", [True, 2.0])
def test_a_group_size_that_is_no_integer_is_refused(size):
    with pytest.raises(RowTypeError):
        GroupAccumulator(batch(4), size)


def test_an_empty_batch_has_no_groups():
    with pytest.raises(RowValueError):
        GroupAccumulator([], 1)


def test_a_stream_that_ends_early_names_the_missing_rows_and_the_cause():
    groups = GroupAccumulator(batch(4), 2)
    groups.add(result(1))
    died = ActorDiedError("worker default/0 died", exit_code=137)
    with pytest.raises(
        IncompleteStreamError, match=r"3 of 4 rows missing \(rows 0, 2, 3\): worker"
    ) as caught:
        groups.finish(died)
    assert caught.value.missing == [0, 2, 3]
    assert caught.value.__cause__ is died


def test_many_missing_rows_are_counted_not_listed():
    with pytest.raises(IncompleteStreamError, match="and 80 more"):
        GroupAccumulator(batch(100), 2).finish()
