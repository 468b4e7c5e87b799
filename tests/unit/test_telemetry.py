import logging

import pytest

from gymrl.telemetry import RateLimitedLog, Timer


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_timer_sums_the_spans_of_a_name_under_its_prefix():
    clock = Clock()
    timer = Timer("timing/rollout", clock)

    for seconds in (1.5, 2.0):
        with timer.span("total"):
            clock.now += seconds
    timer.add("wait", 0.25)

    assert timer.seconds() == {"timing/rollout/total": 3.5, "timing/rollout/wait": 0.25}


def test_a_span_that_raises_is_timed_as_well():
    clock = Clock()
    timer = Timer(clock=clock)

    def fail() -> None:
        with timer.span("total"):
            clock.now += 1
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()

    assert timer.seconds() == {"total": 1}


def test_a_kind_of_event_is_logged_once_an_interval_and_the_rest_is_counted(caplog):
    clock = Clock()
    log = RateLimitedLog(logging.getLogger("gymrl.test"), interval_s=10, clock=clock)

    assert log.log("slow", logging.WARNING, "row %d is slow", 1)
    assert not log.log("slow", logging.WARNING, "row %d is slow", 2)
    assert log.log("other", logging.WARNING, "100% sure")
    clock.now = 10.0
    assert log.log("slow", logging.WARNING, "row %d is slow", 3)

    assert [r.getMessage() for r in caplog.records] == [
        "row 1 is slow",
        "100% sure",
        "row 3 is slow (1 more like this since)",
    ]
