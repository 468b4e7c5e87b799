from gymrl.actors import RestartPolicy
from gymrl.rollout.restarts import Restarts


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make(restarts=2, **settings):
    clock = Clock()
    return Restarts(RestartPolicy(restarts=restarts, **settings), clock), clock


def test_each_death_costs_a_restart_until_none_is_left():
    budget, clock = make(2)
    for left in (1, 0):
        budget.charge("a")
        clock.now += 10
        assert (budget.left, budget.is_spent) == (left, False)
    budget.charge("a")
    assert budget.is_spent


def test_workers_that_die_together_cost_one():
    budget, clock = make(2, correlation_s=2.0)
    for label in ("a", "b", "c", "d"):
        budget.charge(label)
        clock.now += 0.5
    assert budget.left == 1


def test_one_worker_that_dies_again_and_again_pays_each_time():
    budget, clock = make(3, correlation_s=2.0)
    budget.charge("a")
    clock.now += 0.5
    budget.charge("a")
    assert budget.left == 1


def test_no_restarts_are_none():
    budget, _ = make(0)
    budget.charge("a")
    assert budget.is_spent


def test_a_worker_that_finishes_a_row_gives_back_what_its_deaths_have_cost():
    budget, clock = make(3, correlation_s=0.0)
    for _ in range(2):
        budget.charge("a")
        clock.now += 10
    budget.charge("b")
    budget.refund("a")
    assert budget.left == 2
    budget.refund("a")
    assert budget.left == 2
    budget.refund("b")
    assert budget.left == 3


def test_a_spent_budget_stays_spent():
    budget, _ = make(0)
    budget.charge("a")
    budget.refund("a")
    assert budget.is_spent


def test_deaths_of_a_worker_that_tests_suspects_are_free():
    budget, clock = make(1, correlation_s=0.0)
    with budget.testing("a"):
        budget.charge("a")
        clock.now += 10
        assert budget.left == 1
        budget.charge("b")
        assert budget.left == 0
    clock.now += 10
    budget.charge("a")
    assert budget.is_spent


def test_a_fleet_that_dies_whatever_it_tests_pays():
    budget, clock = make(1, correlation_s=0.0)
    with budget.testing("a"):
        for left in (1, 1, 0):
            budget.charge("a")
            clock.now += 10
            assert budget.left == left
        budget.refund("b")
        budget.charge("a")
        assert not budget.is_spent


def test_pauses_double_and_are_bounded():
    budget, _ = make(9, backoff_s=0.5, max_backoff_s=3.0)
    assert [budget.pause_s(n) for n in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
