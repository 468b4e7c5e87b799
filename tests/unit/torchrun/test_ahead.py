"""Generation that runs ahead stays within its bound, whatever completes first."""

import hypothesis.strategies as st
from hypothesis import given, settings

from gymrl.torchrun.ahead import Ordered, choose, derived_seed


def order(position, version):
    return Ordered(position, version)


def test_the_first_to_complete_goes_first():
    old, new = order(0, 3), order(1, 3)
    assert choose([old, new], [new], 1, slack=1) == [new]


def test_a_group_that_would_become_too_old_is_waited_for():
    old, new = order(0, 1), order(1, 2)
    assert choose([old, new], [new], 1, slack=1) is None
    assert choose([old, new], [new, old], 1, slack=1) == [old]


def test_more_updates_than_steps_hand_out_the_oldest_and_do_not_wait_for_ever():
    orders = [order(0, 0), order(1, 0)]
    assert choose(orders, orders[::-1], 1, slack=5) == [orders[0]]


def test_seeds_of_different_places_differ():
    seeds = {derived_seed(seed, place) for seed in range(10) for place in range(100)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)


@given(st.integers(0, 4), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_no_group_is_older_than_the_bound_in_any_order_of_completion(bound, count, random):
    outstanding, completed, position = [], [], 0
    for version in range(12):
        while len(outstanding) < (bound + 1) * count:
            outstanding.append(order(position, version))
            position += 1
        while (chosen := choose(outstanding, completed, count, version - bound)) is None:
            completed.append(random.choice([o for o in outstanding if o not in completed]))
        assert len(chosen) == count
        assert all(0 <= version - o.version <= bound for o in chosen)
        outstanding = [o for o in outstanding if o not in chosen]
        completed = [o for o in completed if o not in chosen]
        while len(outstanding) < bound * count:
            outstanding.append(order(position, version))
            position += 1
        for running in outstanding:
            if running not in completed and random.random() < 0.3:
                completed.append(running)
