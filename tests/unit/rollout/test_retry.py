import random

import pytest

from gymrl.errors import (
    ActorDiedError,
    GymTransportError,
    NonContiguousTokensError,
    RolloutDataFailure,
    RolloutInfraFailure,
    RolloutRedispatchExhausted,
    RolloutStreamError,
)
from gymrl.rollout.retry import (
    Attempts,
    death_failure,
    ends_run,
    error_of,
    located,
    poison_failure,
    rejection,
    run_error,
    timeout_failure,
)
from gymrl.types import Failure, FailureKind


def failure(kind="data", error="NoGenerationError", **fields):
    return Failure(kind=FailureKind(kind), error=error, message="what happened", **fields)


INFRA = failure("infra", "GymTransportError")
DATA = failure("data")


def test_each_kind_has_a_budget_of_its_own():
    attempts = Attempts(3, 2)
    assert attempts.of(7) == 1
    assert attempts.delay_before_next(7, DATA) is not None
    assert attempts.delay_before_next(7, INFRA) is not None
    assert attempts.delay_before_next(7, INFRA) is not None
    assert attempts.of(7) == 4
    assert attempts.delay_before_next(7, INFRA) is None
    assert attempts.delay_before_next(7, DATA) is None


def test_refused_connections_have_a_budget_of_their_own():
    refused = failure("infra", "GymTransportError", fields={"was_sent": False})
    attempts = Attempts(3, 1)
    for told in (refused, INFRA, refused, INFRA):
        assert attempts.delay_before_next(0, told) is not None
    assert attempts.of(0) == 5
    assert attempts.delay_before_next(0, refused) is None
    assert attempts.delay_before_next(0, INFRA) is None


def test_what_is_not_known_to_be_refused_counts_as_sent():
    attempts = Attempts(2, 1)
    for told in (None, True):
        sent = failure("infra", "GymTransportError", fields={"was_sent": told})
        assert Attempts(1, 1).delay_before_next(0, sent) is None
    assert attempts.delay_before_next(0, INFRA) is not None


def test_rows_do_not_share_a_budget():
    attempts = Attempts(2, 1)
    assert attempts.delay_before_next(0, INFRA) is not None
    assert attempts.delay_before_next(1, INFRA) is not None
    assert attempts.delay_before_next(0, INFRA) is None


def test_a_budget_of_one_never_dispatches_again():
    attempts = Attempts(1, 1)
    assert attempts.delay_before_next(0, INFRA) is None
    assert attempts.delay_before_next(0, DATA) is None


def test_infra_delays_grow_are_jittered_and_bounded():
    attempts = Attempts(20, 1, 0.5, random.Random(0))
    delays = [attempts.delay_before_next(0, INFRA) for _ in range(10)]
    for count, delay in enumerate(delays):
        ceiling = min(30.0, 0.5 * 2**count)
        assert ceiling / 2 <= delay <= ceiling
    others = [Attempts(20, 1, 0.5, random.Random(n)).delay_before_next(0, INFRA) for n in range(5)]
    assert len(set(others)) == 5


def test_data_failures_do_not_wait():
    assert Attempts(1, 2).delay_before_next(0, DATA) == 0.0


@pytest.mark.parametrize(("asked", "least"), [(7.0, 7.0), (7, 7.0), (1e9, 30.0), ("soon", 0.0)])
def test_a_server_that_says_when_is_listened_to_within_bounds(asked, least):
    told = failure("infra", "GymTransportError", fields={"retry_after_s": asked})
    delay = Attempts(2, 1).delay_before_next(0, told)
    assert least <= delay <= max(least, 0.5)


def test_a_failure_becomes_the_error_it_was_made_of():
    made = failure(
        error="NonContiguousTokensError",
        row=3,
        turn=1,
        traceback="Traceback of the worker",
        fields={"position": 3, "expected": [4], "received": [9], "unknown": 1},
    )
    error = error_of(made)
    assert isinstance(error, NonContiguousTokensError)
    assert (error.row, error.turn, error.position) == (3, 1, 3)
    assert (error.expected, error.received) == ([4], [9])
    assert "Traceback of the worker" in error.__notes__[0]


@pytest.mark.parametrize("name", ["KeyError", "annotations", "GymrlError", "ConfigError", ""])
@pytest.mark.parametrize(
    ("kind", "cls"), [("infra", RolloutInfraFailure), ("data", RolloutDataFailure)]
)
def test_a_failure_of_a_class_unknown_here_keeps_its_kind_and_name(name, kind, cls):
    error = error_of(failure(kind, name))
    assert type(error) is cls
    assert str(error) == f"{name}: what happened"


def test_the_driver_adds_what_only_it_knows():
    known = located(failure(), 4, "math", "default/1", 2)
    assert (known.row, known.agent, known.instance, known.attempts) == (4, "math", "default/1", 2)
    assert located(failure(agent="mine"), 4, "math", "default/1", 2).agent == "mine"


def test_a_data_failure_ends_a_run_with_its_row_agent_and_instance():
    error = run_error(located(failure(), 4, "math", "default/1", 2))
    assert isinstance(error, RolloutStreamError)
    assert "row 4 (agent 'math', instance 'default/1') failed: NoGenerationError" in str(error)


def test_an_infra_failure_ends_a_run_with_its_count():
    error = run_error(located(INFRA, 4, "math", "default/1", 5))
    assert isinstance(error, RolloutRedispatchExhausted)
    assert "failed 5 times" in str(error)
    assert isinstance(error.__cause__, GymTransportError)


def test_one_attempt_is_told_as_once():
    error = run_error(located(INFRA, 4, "math", "default/1", 1))
    assert "failed once, last with GymTransportError" in str(error)


def test_a_deadline_of_the_drivers_ends_a_run_without_claiming_a_spent_budget():
    late = located(
        timeout_failure(4, "its group did not end", 5.0, "group_timeout_s"), 4, "m", "d", 1
    )
    error = run_error(late, is_exhausted=False)
    assert type(error) is RolloutStreamError
    assert "did not end within 5 s (set by group_timeout_s)" in str(error)
    assert (error.__cause__.seconds, error.__cause__.setting) == (5.0, "group_timeout_s")


def test_a_death_is_the_fleets_fault_and_a_poisonous_row_its_own():
    died = ActorDiedError("w was killed by SIGKILL", actor="w", signal=9, stderr="last words")
    fleets, rows_own = death_failure(died), poison_failure(4, 3, died)
    assert (fleets.kind, fleets.error, fleets.fields["stderr"]) == (
        "infra",
        "ActorDiedError",
        "last words",
    )
    assert (rows_own.kind, rows_own.error, rows_own.fields["deaths"]) == ("data", "PoisonError", 3)
    assert "w was killed by SIGKILL" in rows_own.message


@pytest.mark.parametrize(
    ("made", "policy", "ends"),
    [
        (DATA, "raise", True),
        (DATA, "mask", False),
        (DATA, "drop_group", False),
        (INFRA, "raise", True),
        (INFRA, "mask", True),
        (INFRA, "drop_group", True),
        (failure("infra", "RolloutTimeout"), "raise", True),
        (failure("infra", "RolloutTimeout"), "mask", False),
        (failure("infra", "RolloutTimeout"), "drop_group", False),
        (failure("data", "PoisonError"), "raise", True),
        (failure("data", "PoisonError"), "mask", False),
        (rejection(4), "raise", False),
        (rejection(4), "drop_group", False),
    ],
)
def test_the_policy_decides_but_a_broken_fleet_ends_the_run(made, policy, ends):
    assert ends_run(made, policy) is ends
