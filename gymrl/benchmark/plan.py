"""The plan of an evaluation: every task once, with a stable id and a digest of its input.

The file format is ``nemo-gym.eval-plan.v1``. The same tasks give the same bytes, whatever the order
of the rows, their repeats, and where they are routed to.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gymrl.errors import ConfigError
from gymrl.gym.materialized import is_materialized, taskset_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

EVAL_PLAN_SCHEMA = "nemo-gym.eval-plan.v1"
TASK_ID_FIELDS = ("task_id", "problem_id", "instance_id")
_ROUTING_FIELDS = frozenset({"agent_ref", "task_source", "skills_ref"})
_BOOKKEEPING_PREFIX = "_ng_"
_SHOWN_ROWS = 5
_SHOWN_IDS = 10


class PlanGym(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The Gym that a plan was made with.

    Attributes:
        version: Its version.
        commit: Of its git checkout, ``-dirty`` behind it where files differ; None: no checkout.
    """

    version: str
    commit: str | None


class PlanBenchmark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is evaluated.

    Attributes:
        name: Of the benchmark's dataset.
        config_paths: The configuration it was selected with, relative to its search root.
    """

    name: str
    config_paths: list[str]


class TaskId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task's identity: its set, and its id in there."""

    taskset: str
    task_id: str


class PlanTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task.

    Attributes:
        task_id: Its identity.
        digest: ``sha256:`` and the digest of its input as canonical JSON.
    """

    task_id: TaskId
    digest: str


class EvalPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A benchmark's tasks, each once, sorted by id.

    Attributes:
        schema_name: The format, ``schema`` in JSON.
        gym: What made the plan.
        benchmark: What is evaluated.
        selected_task_ids: The ids that were asked for, sorted; None: all tasks.
        tasks: Sorted by ``task_id.task_id``.
    """

    schema_name: str = msgspec.field(default=EVAL_PLAN_SCHEMA, name="schema")
    gym: PlanGym
    benchmark: PlanBenchmark
    selected_task_ids: list[str] | None = None
    tasks: list[PlanTask]

    def __post_init__(self) -> None:
        if self.schema_name != EVAL_PLAN_SCHEMA:
            raise ConfigError(
                f"schema={self.schema_name!r}: only {EVAL_PLAN_SCHEMA!r} can be read",
                setting="schema",
            )

    def to_json(self) -> str:
        """The plan's file, byte for byte: sorted keys, two spaces, a newline at the end."""
        return json.dumps(msgspec.to_builtins(self), **_FILE_FORMAT) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> EvalPlan:
        """Read a plan's file.

        Raises:
            ConfigError: It is no plan of this format.
        """
        return decoded(text, cls, "the plan")


_FILE_FORMAT: dict[str, Any] = {"sort_keys": True, "indent": 2, "ensure_ascii": False}


def decoded(text: str | bytes, kind: type[T], what: str) -> T:
    """JSON as a struct.

    Raises:
        ConfigError: It is none; says where.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{what} cannot be read: {error}", setting="plan") from error


def row_task_id(row: Mapping[str, Any]) -> str | None:
    """A row's own task id: the first of ``task_id``, ``problem_id``, ``instance_id`` it has.

    A materialized row's ``task_id`` holds set and id; the id is taken.
    """
    value = next((row[name] for name in TASK_ID_FIELDS if row.get(name) is not None), None)
    if isinstance(value, dict):
        value = value.get("task_id")
    return None if value is None else str(value)


def materialized(row: Mapping[str, Any], taskset: str) -> dict[str, Any]:
    """A flat row, which has an id, as the materialized task of a set."""
    return {
        "task_id": {"taskset": taskset, "task_id": row_task_id(row)},
        "task_input": task_input(row),
    }


def task_input(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row is the task: all but where it goes and how often."""
    if is_materialized(row):
        given: dict[str, Any] = row["task_input"]
        return given
    return {
        name: value
        for name, value in row.items()
        if name not in _ROUTING_FIELDS and not name.startswith(_BOOKKEEPING_PREFIX)
    }


def task_digest(row: Mapping[str, Any]) -> str:
    """``sha256:`` and the digest of the row's task as canonical JSON.

    Raises:
        ConfigError: The row cannot be written as JSON.
    """
    try:
        text = json.dumps(
            task_input(row), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"task {row_task_id(row)!r} cannot be written as JSON: {error}", setting="rows"
        ) from error


def require_task_ids(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """The task id of every row.

    Raises:
        ConfigError: Rows have none; a place in the file is no identity.
    """
    ids = [row_task_id(row) for row in rows]
    missing = [index for index, found in enumerate(ids) if found is None]
    if missing:
        raise ConfigError(
            f"Benchmark {name!r}: {len(missing)} of {len(rows)} tasks have no task id "
            f"(none of {list(TASK_ID_FIELDS)}), e.g. rows {missing[:_SHOWN_ROWS]}. A plan needs "
            "ids that do not depend on row order; add a `task_id` field in the benchmark's "
            "prepare.py, or say in the overrides where they are to be taken from: `task_ids_from`, a "
            "field of the rows or `content`.",
            setting="task_id",
        )
    return [found for found in ids if found is not None]


def build_plan(
    rows: Sequence[Mapping[str, Any]],
    *,
    benchmark: PlanBenchmark,
    taskset: str,
    gym: PlanGym,
    selected_task_ids: Sequence[str] | None = None,
) -> EvalPlan:
    """The plan of a benchmark's rows, each task once in them.

    Args:
        rows: Flat dataset rows, before they are repeated.
        benchmark: What they are.
        taskset: Of their ids.
        gym: What made them.
        selected_task_ids: Only these; None: all.

    Raises:
        ConfigError: A row without an id, an id twice, a row that is materialized, or selected ids
            that no row has.
    """
    name = benchmark.name
    ids = require_task_ids(rows, name)
    if any(is_materialized(row) for row in rows):
        raise ConfigError(
            f"Benchmark {name!r}: Expected a flat dataset row, not an already materialized task",
            setting="rows",
        )
    tasks: dict[str, PlanTask] = {}
    twice: set[str] = set()
    for found, row in zip(ids, rows, strict=True):
        if found in tasks:
            twice.add(found)
        tasks[found] = PlanTask(TaskId(taskset, found), task_digest(row))
    if twice:
        raise ConfigError(
            f"Benchmark {name!r}: task ids are not unique: {sorted(twice)[:_SHOWN_IDS]}",
            setting="task_id",
        )
    selected = None if selected_task_ids is None else sorted(set(selected_task_ids))
    unknown = [found for found in selected or [] if found not in tasks]
    if unknown:
        raise ConfigError(
            f"Benchmark {name!r} has no tasks with ids {unknown[:_SHOWN_IDS]}", setting="task_ids"
        )
    return EvalPlan(
        gym=gym,
        benchmark=benchmark,
        selected_task_ids=selected,
        tasks=[tasks[found] for found in (sorted(tasks) if selected is None else selected)],
    )


class PlannedBenchmark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prepared benchmark.

    Attributes:
        plan: Ids and input digests of its tasks.
        rows: The collated rows to run, each task's as often as the benchmark repeats it.
    """

    plan: EvalPlan
    rows: list[dict[str, Any]]

    @property
    def gym_commit(self) -> str | None:
        """The Gym commit the plan was made with; None when it was no git checkout."""
        return self.plan.gym.commit

    def task_ids(self) -> list[str]:
        """The ids of the planned tasks, sorted."""
        return [task.task_id.task_id for task in self.plan.tasks]

    def task_digests(self) -> dict[str, str]:
        """Each planned task's id and the digest of its input, which changes when the input does."""
        return {task.task_id.task_id: task.digest for task in self.plan.tasks}

    def to_json(self) -> str:
        """The planned benchmark as JSON text, for another process; :meth:`from_json` reads it.

        The rows' keys stay in their order: a prompt shows the order of a tool's parameters.
        """
        return json.dumps(msgspec.to_builtins(self), **(_FILE_FORMAT | {"sort_keys": False})) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> PlannedBenchmark:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: It is no planned benchmark, or its rows are not those of its plan.
        """
        planned = decoded(text, cls, "the planned benchmark")
        digests = planned.task_digests()
        for index, row in enumerate(planned.rows):
            if is_materialized(row):
                taskset_of(row, index)
        found = [(str(row_task_id(row)), task_digest(row)) for row in planned.rows]
        differing = {name for name, digest in found if digests.get(name) != digest}
        differing |= digests.keys() - {name for name, _ in found}
        if differing:
            raise ConfigError(
                "the rows are not those of the plan; they differ in the tasks "
                f"{sorted(differing)[:_SHOWN_IDS]}",
                setting="rows",
            )
        return planned
