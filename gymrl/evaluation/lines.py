"""What a report needs of a file's lines, one at a time and no more.

Token lists, requests and answers are skipped while a line is decoded, so a file of any size costs the
memory of its longest line. Fields that are unknown here are passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gymrl.errors import ConfigError, RowValueError
from gymrl.evaluation.plan import TaskKey, config_digest
from gymrl.gym.schema import LENGTH_REASONS
from gymrl.records import lines as records
from gymrl.records.schema import RunRecord
from gymrl.types import FailureKind, Reward

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from gymrl.evaluation.plan import EvaluationPlan


class TurnLine(msgspec.Struct, frozen=True, gc=False):
    """The spans of a turn."""

    start: int
    generation_start: int
    end: int


class _Usage(msgspec.Struct, frozen=True, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Response(msgspec.Struct, frozen=True, gc=False):
    usage: _Usage | None = None


class _Result(msgspec.Struct, frozen=True, gc=False):
    response: _Response | None = None


class TrajectoryLine(msgspec.Struct, frozen=True, gc=False):
    """What a report says of a trajectory."""

    turns: tuple[TurnLine, ...]
    reward: Reward
    incomplete_reason: str | None = None
    placeholder: bool = False
    truncated_prefix: bool = False
    result: msgspec.Raw = msgspec.Raw(b"{}")

    def lengths(self) -> tuple[int | None, int | None]:
        """All tokens, and the sampled ones.

        Of a row without tokens those that its server says it used; None where it does not say.
        """
        if not self.placeholder:
            generated = sum(turn.end - turn.generation_start for turn in self.turns)
            return (self.turns[-1].end if self.turns else 0), generated
        try:
            response = msgspec.json.decode(self.result, type=_Result).response
        except msgspec.DecodeError:
            response = None
        usage = (response.usage if response else None) or _Usage()
        if usage.input_tokens is None or usage.output_tokens is None:
            return None, usage.output_tokens
        return usage.input_tokens + usage.output_tokens, usage.output_tokens

    @property
    def is_truncated(self) -> bool:
        """Whether its last response was cut by a token limit."""
        return self.incomplete_reason in LENGTH_REASONS


class FailureLine(msgspec.Struct, frozen=True, gc=False):
    """What a report says of a failure."""

    kind: FailureKind
    error: str
    message: str = ""
    fields: dict[str, object] = {}


class RowLine(msgspec.Struct, frozen=True, gc=False, tag="row", tag_field="record"):
    """One row of a file of an evaluation."""

    task_digest: str
    rollout_index: int
    rollout_id: str
    benchmark: str = ""
    task_id: str = ""
    cohort: str = ""
    trajectory: TrajectoryLine | None = None
    failure: FailureLine | None = None

    @property
    def counts_as_try(self) -> bool:
        """Whether the attempt failed and cost somebody something."""
        return self.failure is not None and costs_a_try(self.failure.fields)


def costs_a_try(fields: Mapping[str, object]) -> bool:
    """Whether a failure of these fields is one of a row's tries: its attempt reached a server."""
    return fields.get("was_sent") is not False


_decoder = msgspec.json.Decoder(RunRecord | RowLine)
_LABELS = "benchmarks"


def run_record(plan: EvaluationPlan) -> RunRecord:
    """The first line of a file of a plan."""
    policy = plan.settings.policy
    labels = [benchmark.label for benchmark in plan.benchmarks]
    notes = {
        "benchmark": ", ".join(labels),
        _LABELS: msgspec.json.encode(labels).decode(),
        "model": policy.model or policy.name or "",
    }
    return RunRecord(config_digest=plan.config_digest, notes=notes)


def read_lines(path: Path, plan: EvaluationPlan) -> Iterator[tuple[int, RowLine]]:
    """The rows of an evaluation's file with their lines' numbers from 1, as they were written.

    A last line without its end is left out with a warning: it is being written, or a kill tore it.

    Args:
        path: The file.
        plan: What it is of; it may have grown since the file was begun.

    Raises:
        ConfigError: The file is missing, or of another configuration or a newer format.
        RowValueError: A line before the last is no record; names file and line.
    """
    try:
        for place, record in records.read_lines(path, _decoder):
            if isinstance(record, RunRecord):
                _check_run(path, record, plan)
            else:
                yield place.number, record
    except RowValueError as error:
        raise RowValueError(
            f"{error}; take the line out, and its row is run again when the evaluation is continued"
        ) from error


def counting_lines(path: Path, plan: EvaluationPlan) -> Iterator[tuple[int, RowLine]]:
    """As :func:`read_lines`, without results of cohorts that are not whole.

    The results of attempts that were compared with each other come once all of them have come: a kill
    may have torn them, and then they are made again, as another cohort.

    Args:
        path: The file.
        plan: What it is of.

    Raises:
        ConfigError, RowValueError: As :func:`read_lines`.
    """
    sizes = {task.key: task.group_size for task in plan.tasks() if task.group_size > 1}
    held: dict[tuple[TaskKey, str], dict[int, tuple[int, RowLine]]] = {}
    for number, line in read_lines(path, plan):
        task = TaskKey(line.benchmark, line.task_digest)
        size = sizes.get(task, 1)
        if size == 1 or line.trajectory is None:
            yield number, line
            continue
        cohort = held.setdefault((task, line.cohort), {})
        cohort[line.rollout_index] = number, line
        if len(cohort) == size:
            yield from held.pop((task, line.cohort)).values()


def _check_run(path: Path, run: RunRecord, plan: EvaluationPlan) -> None:
    records.check_schema(path, run)
    # Benchmarks that the plan has gained since are not in the file's digest.
    labels = msgspec.json.decode(run.notes.get(_LABELS, "[]"), type=list[str])
    known = tuple(b for b in plan.benchmarks if not labels or b.label in labels)
    expected = config_digest(plan.settings, known)
    if run.config_digest != expected:
        raise ConfigError(
            f"{path} was written with another configuration ({run.config_digest or 'none'}) than "
            f"its plan has ({expected})",
            setting=str(path),
        )
