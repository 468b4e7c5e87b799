from collections.abc import AsyncIterator

import pytest

from gymrl.gym.shards import Shard, ShardSet
from gymrl.rollout.dispatch import Dispatcher
from gymrl.types import Row


class Place:
    """An instance that is up or down."""

    def __init__(self, is_ready=True):
        self.is_ready = is_ready
        self.is_testing = False


class Sent:
    """Takes dispatches in the merge's place; no stream is read."""

    def __init__(self):
        self.dispatches = []

    def add(self, dispatch, stream: AsyncIterator) -> None:
        self.dispatches.append(dispatch)

    @property
    def told(self):
        return [(d.label, sorted(d.waiting), d.is_test) for d in self.dispatches]


def rows_of(count):
    return [
        Row(
            index=n,
            task_index=n,
            rollout_index=0,
            route="math",
            rollout_id=f"r{n}",
            body=b"{}",
        )
        for n in range(count)
    ]


@pytest.fixture
def make():
    def make(count, unit_size=1, replicas=1):
        places = [Place() for _ in range(replicas)]
        sent = Sent()
        dispatcher = Dispatcher(sent, ShardSet([Shard("s", places, ["math"])]), unit_size)
        rows = rows_of(count)
        dispatcher.start(rows)
        return dispatcher, sent, rows, places

    return make


def die(dispatcher, sent, place=0, alone=True):
    """The worker of a dispatch dies with all of it under way."""
    dispatch = sent.dispatches.pop(place)
    dispatcher.ended(dispatch)
    dispatch.was_alone = alone
    rows = list(dispatch.waiting.values())
    for row in rows:
        dispatcher.add_death(row.index)
    if dispatcher.is_poison(dispatch):
        return rows[0].index
    dispatcher.after_death(dispatch, rows, 0.0)
    return None


def test_what_a_dead_worker_had_goes_to_another_replica(make):
    dispatcher, sent, _, _ = make(4, replicas=2)
    assert sent.told == [("s/0", [0, 2], False), ("s/1", [1, 3], False)]
    die(dispatcher, sent)
    assert sent.told == [("s/1", [1, 3], False), ("s/1", [0, 2], False)]


def test_it_waits_for_the_restart_where_no_other_replica_is_up(make):
    dispatcher, sent, _, places = make(4, replicas=2)
    places[1].is_ready = False
    die(dispatcher, sent)
    assert sent.told[-1] == ("s/0", [0, 2], False)


def test_groups_stay_whole_wherever_they_go(make):
    dispatcher, sent, _, _ = make(12, unit_size=2, replicas=3)
    die(dispatcher, sent)
    homes = {}
    for label, indices, _ in sent.told:
        for index in indices:
            homes.setdefault(index // 2, set()).add(label)
    assert all(len(labels) == 1 for labels in homes.values())
    assert "s/0" not in set.union(*homes.values())


def test_a_group_of_which_a_row_waits_at_its_home_does_not_move(make):
    dispatcher, sent, rows, _ = make(4, unit_size=4, replicas=2)
    sent.dispatches[0].waiting.pop(3)
    dispatcher.again(rows[3], 5.0)  # it failed and waits for its second attempt
    die(dispatcher, sent)
    assert sent.told == [("s/0", [3], False), ("s/0", [0, 1, 2], False)]


def test_a_row_that_was_answered_is_not_asked_for_again(make):
    dispatcher, sent, _, _ = make(3)
    sent.dispatches[0].waiting.pop(1)
    die(dispatcher, sent)
    assert sent.told == [("s", [0, 2], False)]


def test_a_failed_row_that_stands_alone_goes_to_another_replica(make):
    dispatcher, sent, rows, _ = make(1, replicas=2)
    dispatcher.again(rows[0], 0.0)
    assert sent.told[-1] == ("s/1", [0], False)


def test_a_failed_row_of_a_group_stays_where_its_group_is(make):
    dispatcher, sent, rows, _ = make(2, unit_size=2, replicas=2)
    dispatcher.again(rows[1], 0.0)
    assert sent.told[-1] == ("s/0", [1], False)


def test_the_first_death_suspects_nobody(make):
    dispatcher, sent, _, _ = make(9)
    assert die(dispatcher, sent) is None
    assert sent.told == [("s", list(range(9)), False)]


def test_at_the_second_death_suspects_go_out_in_lots(make):
    dispatcher, sent, _, _ = make(9)
    die(dispatcher, sent)
    die(dispatcher, sent)
    assert sent.told == [("s", [0, 1, 2], True), ("s", [3, 4, 5], True), ("s", [6, 7, 8], True)]


@pytest.mark.parametrize("killer", [0, 4, 8])
@pytest.mark.parametrize("unit_size", [1, 3])
def test_the_row_that_kills_is_found_and_no_other_is_blamed(make, killer, unit_size):
    dispatcher, sent, _, _ = make(9, unit_size=unit_size)
    deaths, blamed, served = 0, [], set()
    while sent.dispatches:
        if killer not in sent.dispatches[0].waiting:
            served |= set(sent.dispatches[0].waiting)
            dispatcher.ended(sent.dispatches.pop(0))
            continue
        deaths += 1
        found = die(dispatcher, sent)
        blamed += [found] if found is not None else []
    assert blamed == [killer]
    assert served == set(range(9)) - {killer}
    assert deaths <= 5  # what the default budget of attempts allows


def test_a_single_row_is_found_at_the_third_death(make):
    dispatcher, sent, _, _ = make(1)
    assert [die(dispatcher, sent) for _ in range(3)] == [None, None, 0]


def test_a_suspect_that_dies_in_company_is_not_blamed_but_tested_again(make):
    dispatcher, sent, _, _ = make(1)
    assert [die(dispatcher, sent, alone=False) for _ in range(4)] == [None] * 4
    assert sent.told == [("s", [0], True)]
    assert die(dispatcher, sent) == 0


def test_nothing_moves_to_a_replica_that_has_suspects(make):
    dispatcher, sent, _, places = make(2, replicas=2)
    places[1].is_testing = True
    die(dispatcher, sent)
    assert sent.told[-1] == ("s/0", [0], False)


def test_waiting_rows_are_named_by_the_instance_that_has_them(make):
    dispatcher, _, _, _ = make(4, replicas=2)
    assert dispatcher.whose_are([0, 1, 2]) == "rows 0, 2 at 's/0'; row 1 at 's/1'"
