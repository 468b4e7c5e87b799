"""How far a run is: counters, and two ways to show them.

On a terminal a live display; on a pipe plain lines, at most one an interval. Both write to standard
error, so that standard output holds the result alone.
"""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING, Protocol

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gymrl.types import Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from gymrl.types import RolloutGroup, RowResult


class RunProgress:
    """Counters of a running run.

    Args:
        num_groups: Groups to come.
        num_rows: Rows to come.
        clock: Monotonic seconds.
    """

    def __init__(
        self, num_groups: int, num_rows: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_groups = num_groups
        self.num_rows = num_rows
        self.groups_done = 0
        self.rows_done = 0
        self.rows_failed = 0
        self.generated_tokens = 0
        self._rewards = 0
        self._reward_sum = 0.0
        self._clock = clock
        self._started = clock()

    def begin(self) -> None:
        """The rollouts begin now: speeds leave out what went before."""
        self._started = self._clock()

    def add_row(self, result: RowResult) -> None:
        """Count a row that has its outcome."""
        self.rows_done += 1
        if isinstance(result.outcome, Trajectory):
            self.generated_tokens += result.outcome.num_generated
        else:
            self.rows_failed += 1

    def add_group(self, group: RolloutGroup) -> None:
        """Count a whole, scored group."""
        self.groups_done += 1
        for trajectory in group.trajectories:
            self.add_reward(trajectory.reward.total)

    def add_reward(self, reward: float) -> None:
        """Count a reward into the mean."""
        self._rewards += 1
        self._reward_sum += reward

    @property
    def elapsed(self) -> float:
        """Seconds since :meth:`begin`."""
        return self._clock() - self._started

    @property
    def rows_in_flight(self) -> int:
        """Rows without an outcome yet."""
        return self.num_rows - self.rows_done

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of finished rows a second."""
        return self.generated_tokens / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def mean_reward(self) -> float | None:
        """Over the rows of whole groups that have a reward; None without any."""
        return self._reward_sum / self._rewards if self._rewards else None

    def line(self) -> str:
        """The counters as one line of text."""
        reward = "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        failed = f", {self.rows_failed} rows failed" if self.rows_failed else ""
        return (
            f"groups {self.groups_done}/{self.num_groups}, {self.rows_in_flight} rows in flight, "
            f"{self.tokens_per_s:.1f} tokens/s, mean reward {reward}{failed}"
        )


class Display(Protocol):
    """Where progress is shown."""

    def phase(self, text: str) -> None:
        """Say what is being done now."""
        ...

    def update(self, progress: RunProgress) -> None:
        """Show the counters."""
        ...

    def close(self) -> None:
        """Show nothing more. Safe to call twice."""
        ...


class PlainDisplay:
    """Plain lines, at most one an interval; the last state is always shown.

    Args:
        stream: Where lines go; each is flushed.
        interval_s: Seconds between two lines of counters.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        stream: IO[str],
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._last: float | None = None
        self._left_out: RunProgress | None = None

    def phase(self, text: str) -> None:
        """Write the text as a line."""
        self._write(text)

    def update(self, progress: RunProgress) -> None:
        """Write the counters, unless a line was written within the interval."""
        now = self._clock()
        is_last = progress.groups_done == progress.num_groups
        if not is_last and self._last is not None and now - self._last < self._interval_s:
            self._left_out = progress
            return
        self._last, self._left_out = now, None
        self._write(progress.line())

    def close(self) -> None:
        """Write the counters if the last ones were left out."""
        if self._left_out is not None:
            progress, self._left_out = self._left_out, None
            self._write(progress.line())

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


class LiveDisplay:
    """A bar and the counters, redrawn in place; log lines scroll above it.

    Args:
        console: A console on a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=5,
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def phase(self, text: str) -> None:
        """Show the text beside a bar that has no end yet."""
        self._bar.update(self._task, description=text)

    def update(self, progress: RunProgress) -> None:
        """Show the counters beside the bar."""
        self._bar.update(
            self._task,
            total=progress.num_rows,
            completed=progress.rows_done,
            description=progress.line(),
        )

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.stop()


def make_display(console: Console, *, is_live: bool = True) -> Display:
    """A live display where `console` is a terminal that can redraw, else plain lines.

    Args:
        console: Where it is shown.
        is_live: False: plain lines also there, because something else writes to the terminal.
    """
    if is_live and console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console.file)
