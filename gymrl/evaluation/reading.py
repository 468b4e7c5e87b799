"""``read_evaluation``: what a directory holds, task by task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gymrl.errors import ConfigError
from gymrl.evaluation.journal import PLAN_FILE, ROLLOUTS_FILE, read_plan
from gymrl.evaluation.lines import counting_lines
from gymrl.evaluation.plan import EvaluationPlan, TaskKey

if TYPE_CHECKING:
    from gymrl.evaluation.lines import RowLine, TrajectoryLine


class Attempt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished row in numbers.

    Attributes:
        reward: After shaping and penalties, which an evaluation has none of.
        verifier: What the verifier said.
        components: Its parts, where it gave some.
        tokens: All tokens, prompts included; None where nobody knows.
        generated: Sampled tokens, likewise.
        turns: Model calls, likewise.
        has_tokens: Its tokens are recorded.
        is_truncated: The last response was cut by a token limit.
        has_broken_prefix: The chat template rewrote history; `tokens` and `generated` count up to
            there.
    """

    reward: float
    verifier: float
    components: dict[str, float] | None
    tokens: int | None
    generated: int | None
    turns: int | None
    has_tokens: bool
    is_truncated: bool
    has_broken_prefix: bool

    @classmethod
    def of(cls, trajectory: TrajectoryLine) -> Attempt:
        """The numbers of a trajectory."""
        tokens, generated = trajectory.lengths()
        return cls(
            reward=trajectory.reward.total,
            verifier=trajectory.reward.verifier,
            components=trajectory.reward.components,
            tokens=tokens,
            generated=generated,
            turns=None if trajectory.placeholder else len(trajectory.turns),
            has_tokens=not trajectory.placeholder,
            is_truncated=trajectory.is_truncated,
            has_broken_prefix=trajectory.truncated_prefix,
        )


class FailedAttempt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row without a result, and why.

    Attributes:
        error: The class of its last failure.
        message: Its text.
        tries: Times that it has failed.
    """

    error: str
    message: str
    tries: int


class TaskOutcome(msgspec.Struct, kw_only=True):
    """One task and what became of its attempts.

    Attributes:
        key: Its identity.
        task_id: Its id in the benchmark.
        source: What it is reported under.
        repeats: Attempts that were asked for.
        attempts: Those that have a result, by repeat.
        failed: Those that have none and have failed, by repeat.
        line: Line of the file, from 1, of the last row that counts; None where there is none.
    """

    key: TaskKey
    task_id: str
    source: str
    repeats: int
    attempts: dict[int, Attempt] = {}
    failed: dict[int, FailedAttempt] = {}
    line: int | None = None

    @property
    def missing(self) -> int:
        """Attempts that were never made, or have not ended."""
        return self.repeats - len(self.attempts) - len(self.failed)

    @property
    def rewards(self) -> list[float]:
        """Of the attempts with a result, by repeat."""
        return [self.attempts[repeat].reward for repeat in sorted(self.attempts)]

    def passed(self, threshold: float) -> int:
        """Attempts whose verifier's reward is at least `threshold`."""
        return sum(attempt.verifier >= threshold for attempt in self.attempts.values())


class Evaluation(msgspec.Struct, kw_only=True):
    """What a directory holds.

    Attributes:
        directory: Where it was read.
        plan: Its plan.
        tasks: Every planned task, in the order of the plan.
        duplicates: Lines of rows that had their result, or that stand in the file twice.
        foreign: Lines of rows that are not in the plan.
    """

    directory: str
    plan: EvaluationPlan
    tasks: list[TaskOutcome]
    duplicates: int = 0
    foreign: int = 0


def read_evaluation(directory: str | Path) -> Evaluation:
    """Read an evaluation, also while it is being written.

    The file is read line by line; what is kept is a few numbers a row.

    Raises:
        ConfigError: There is no evaluation, or its parts do not fit each other.
        RowValueError: A line before the last is no record; names file and line.
    """
    folder = Path(directory)
    plan = read_plan(folder)
    if plan is None:
        raise ConfigError(
            f"{folder} holds no evaluation: there is no {PLAN_FILE} (gymrl eval run writes it)",
            setting="directory",
        )
    tasks = {
        task.key: TaskOutcome(
            key=task.key, task_id=task.task_id, source=task.source, repeats=task.repeats
        )
        for task in plan.tasks()
    }
    evaluation = Evaluation(directory=str(folder), plan=plan, tasks=list(tasks.values()))
    path = folder / ROLLOUTS_FILE
    if not path.exists():
        return evaluation
    seen: set[str] = set()
    for number, line in counting_lines(path, plan):
        outcome = tasks.get(TaskKey(line.benchmark, line.task_digest))
        if outcome is None or not 0 <= line.rollout_index < outcome.repeats:
            evaluation.foreign += 1
        elif line.rollout_id in seen or line.rollout_index in outcome.attempts:
            evaluation.duplicates += 1
        else:
            outcome.line = number
            _take(outcome, line)
            if line.trajectory is None:
                seen.add(line.rollout_id)  # a finished one is known by its repeat
    return evaluation


def _take(outcome: TaskOutcome, line: RowLine) -> None:
    repeat = line.rollout_index
    if line.trajectory is not None:
        outcome.attempts[repeat] = Attempt.of(line.trajectory)
        outcome.failed.pop(repeat, None)
    elif line.failure is not None:
        before = outcome.failed.get(repeat)
        outcome.failed[repeat] = FailedAttempt(
            error=line.failure.error,
            message=line.failure.message,
            tries=1 if before is None else before.tries + 1,
        )
