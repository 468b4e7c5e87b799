import io

import msgspec
import numpy as np
import pytest
from rich.console import Console

from gymrl.cli.progress import LiveDisplay, PlainDisplay, RunProgress, make_display
from gymrl.types import Failure, FailureKind, Reward, RolloutGroup, Row, RowResult, Trajectory, Turn


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def trajectory(reward, sampled=4):
    return Trajectory(
        agent="agent",
        token_ids=np.zeros(2 + sampled, np.int32),
        logprobs=np.zeros(2 + sampled, np.float32),
        turns=(Turn(start=0, generation_start=2, end=2 + sampled),),
        reward=Reward(reward),
    )


def group(*samples):
    rows = tuple(
        Row(
            index=k,
            task_index=0,
            rollout_index=k,
            route="agent",
            rollout_id=f"r{k}",
            body=msgspec.json.encode({}),
        )
        for k in range(len(samples))
    )
    return RolloutGroup(index=0, task_index=0, rows=rows, samples=samples)


def feed(progress, *samples):
    """Each row as it finishes, then their group."""
    for index, sample in enumerate(samples):
        progress.add_row(RowResult(index=index, agent="agent", outcome=sample))
    progress.add_group(group(*samples))


FAILURE = Failure(kind=FailureKind.DATA, error="GymRequestError", message="422")


def test_counters_follow_the_groups():
    clock = Clock()
    progress = RunProgress(num_groups=3, num_rows=6, clock=clock)
    clock.now += 50
    progress.begin()
    feed(progress, trajectory(1.0), trajectory(0.0))
    clock.now += 2
    assert progress.rows_in_flight == 4
    assert progress.tokens_per_s == pytest.approx(4.0)
    assert progress.mean_reward == 0.5
    assert progress.line() == ("groups 1/3, 4 rows in flight, 4.0 tokens/s, mean reward 0.500")


def test_a_failed_row_is_shown_and_enters_no_mean():
    clock = Clock()
    progress = RunProgress(num_groups=1, num_rows=2, clock=clock)
    feed(progress, trajectory(1.0), FAILURE)
    clock.now += 1
    assert progress.line() == (
        "groups 1/1, 0 rows in flight, 4.0 tokens/s, mean reward 1.000, 1 rows failed"
    )


def test_rows_count_before_their_group_is_whole():
    clock = Clock()
    progress = RunProgress(num_groups=1, num_rows=2, clock=clock)
    progress.add_row(RowResult(index=0, agent="agent", outcome=trajectory(1.0, sampled=6)))
    clock.now += 2
    assert progress.line() == "groups 0/1, 1 rows in flight, 3.0 tokens/s, mean reward -"


def test_before_the_first_reward_there_is_no_mean():
    progress = RunProgress(num_groups=1, num_rows=2, clock=Clock())
    assert progress.mean_reward is None
    assert progress.tokens_per_s == 0.0
    assert "mean reward -" in progress.line()


def test_plain_lines_are_limited_in_rate_and_the_last_state_is_always_shown():
    clock, stream = Clock(), io.StringIO()
    display = PlainDisplay(stream, interval_s=2.0, clock=clock)
    progress = RunProgress(num_groups=4, num_rows=4, clock=clock)
    for _ in range(4):
        feed(progress, trajectory(1.0))
        clock.now += 0.5
        display.update(progress)
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["groups 1/4", "groups 4/4"]


def test_closing_early_shows_the_counters_that_were_left_out():
    clock, stream = Clock(), io.StringIO()
    display = PlainDisplay(stream, interval_s=2.0, clock=clock)
    progress = RunProgress(num_groups=9, num_rows=9, clock=clock)
    for _ in range(3):
        feed(progress, trajectory(1.0))
        display.update(progress)
    display.close()
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["groups 1/9", "groups 3/9"]


def test_a_pipe_gets_plain_lines_and_a_terminal_a_live_display():
    pipe = Console(file=io.StringIO())
    assert isinstance(make_display(pipe), PlainDisplay)
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    display = make_display(terminal)
    assert isinstance(display, LiveDisplay)
    display.close()


def test_a_terminal_that_cannot_redraw_gets_plain_lines():
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_display(dumb), PlainDisplay)


def test_in_one_process_no_bar_draws_over_a_debuggers_prompt():
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    assert isinstance(make_display(terminal, is_live=False), PlainDisplay)


def test_the_live_display_shows_the_counters():
    stream = io.StringIO()
    terminal = Console(
        file=stream, force_terminal=True, width=150, _environ={"TERM": "xterm-256color"}
    )
    display = LiveDisplay(terminal)
    try:
        display.phase("starting")
        progress = RunProgress(num_groups=2, num_rows=2, clock=Clock())
        feed(progress, trajectory(1.0))
        display.update(progress)
    finally:
        display.close()
    assert "groups 1/2" in stream.getvalue()
