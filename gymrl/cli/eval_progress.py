"""How far an evaluation is, for the displays of :mod:`gymrl.cli.progress`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymrl.cli.progress import RunProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.cli.progress import Display
    from gymrl.evaluation import EvaluationPlan
    from gymrl.records.schema import RowRecord


class EvaluationProgress(RunProgress):
    """Counters of a running evaluation; every row is a group of its own.

    Args:
        total: Rows of the plan.
        finished: Of these, rows that had their result before.
        pending: Of these, rows that run now.
        clock: Monotonic seconds; None: the process's.
    """

    def __init__(
        self, total: int, finished: int, pending: int, clock: Callable[[], float] | None = None
    ) -> None:
        if clock is None:
            super().__init__(pending, pending)
        else:
            super().__init__(pending, pending, clock)
        self.total = total
        self.finished = finished

    def add_record(self, record: RowRecord) -> None:
        """Count a row that has ended."""
        self.groups_done += 1
        self.rows_done += 1
        trajectory = record.trajectory
        if trajectory is None:
            self.rows_failed += 1
            return
        self.generated_tokens += sum(t.end - t.generation_start for t in trajectory.turns)
        self.add_reward(trajectory.reward.total)

    def line(self) -> str:
        """The counters as one line of text."""
        reward = "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        before = f" ({self.finished} from before)" if self.finished else ""
        failed = f", {self.rows_failed} failed" if self.rows_failed else ""
        done = self.finished + self.rows_done - self.rows_failed
        return (
            f"rows {done}/{self.total}{before}, {self.tokens_per_s:.1f} tokens/s, "
            f"mean reward {reward}{failed}"
        )


class EvaluationDisplay:
    """Tells a display of a run; an observer of :func:`~gymrl.evaluation.run_evaluation`.

    Args:
        display: Where it is shown.
        what: The policy, in words.
    """

    def __init__(self, display: Display, what: str) -> None:
        self.progress: EvaluationProgress | None = None
        self._display = display
        self._what = what

    def begin(self, plan: EvaluationPlan, finished: int, pending: int) -> None:
        """Say what is run, and what was found."""
        self.progress = EvaluationProgress(plan.num_rows, finished, pending)
        labels = ", ".join(benchmark.label for benchmark in plan.benchmarks)
        left = plan.num_rows - finished - pending
        spent = f", {left} have failed too often (--max-tries)" if left else ""
        self._display.phase(
            f"{labels}: {plan.num_tasks} tasks, {plan.num_rows} rows, {finished} of them finished "
            f"before{spent}"
        )
        if pending:
            self._display.phase(f"starting servers and workers, {self._what}")

    def started(self) -> None:
        """Rows run from now on."""
        if self.progress is not None:
            self.progress.begin()
            self._display.update(self.progress)

    def row(self, record: RowRecord) -> None:
        """Show the counters with the row."""
        if self.progress is not None:
            self.progress.add_record(record)
            self._display.update(self.progress)
