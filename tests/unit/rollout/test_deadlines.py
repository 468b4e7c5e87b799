import pytest

from gymrl.config import GymConfig, RolloutConfig
from gymrl.errors import ConfigError
from gymrl.rollout.deadlines import Deadlines


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_without_deadlines_the_wait_has_no_end(clock):
    deadlines = Deadlines(None, None, clock)
    clock.now += 1e9
    assert deadlines.next_in() is None
    assert not deadlines.groups_are_late()
    assert not deadlines.is_silent()


def test_the_nearest_deadline_comes_first(clock):
    deadlines = Deadlines(10.0, 3.0, clock)
    assert deadlines.next_in() == 3.0
    for _ in range(4):
        clock.now += 2.0
        deadlines.arrived()
    assert deadlines.next_in() == 2.0
    clock.now += 2.0
    assert deadlines.groups_are_late()
    assert not deadlines.is_silent()
    assert deadlines.next_in() == 0.0


def test_an_arrival_ends_silence_but_gives_groups_no_more_time(clock):
    deadlines = Deadlines(5.0, 3.0, clock)
    clock.now += 2.9
    deadlines.arrived()
    clock.now += 2.0
    assert not deadlines.is_silent()
    clock.now += 0.1
    assert deadlines.groups_are_late()


def test_the_consumers_time_does_not_count(clock):
    deadlines = Deadlines(5.0, 3.0, clock)
    clock.now += 1.0
    deadlines.arrived()
    clock.now += 1000.0  # the consumer trains
    deadlines.waits()
    assert deadlines.next_in() == 3.0
    clock.now += 2.0
    assert not deadlines.groups_are_late()
    clock.now += 2.0
    assert deadlines.groups_are_late()
    assert deadlines.is_silent()


@pytest.mark.parametrize("setting", ["group_timeout_s", "no_progress_timeout_s"])
def test_a_deadline_that_has_passed_at_the_start_is_refused(setting):
    gym = GymConfig(base_urls=("http://127.0.0.1:2/v1",))
    with pytest.raises(ConfigError, match=setting):
        RolloutConfig(gym=gym, **{setting: 0.0})


def test_a_negative_number_of_restarts_is_refused():
    gym = GymConfig(base_urls=("http://127.0.0.1:2/v1",))
    with pytest.raises(ConfigError, match="worker_restarts"):
        RolloutConfig(gym=gym, worker_restarts=-1)
