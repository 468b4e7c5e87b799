"""The plan of an evaluation: which tasks of which benchmarks, how often, asked how.

Its file holds everything that a run needs, the tasks' rows included. Two digests say what is the
same: the *configuration's*, over all that decides a row's result beside the row, and each task's.
A finished row is known by both and by its repeat.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gymrl._version import __version__
from gymrl.benchmark.plan import EvalPlan, row_task_id, task_digest
from gymrl.errors import ConfigError
from gymrl.evaluation.settings import EvaluationSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EVALUATION_PLAN_SCHEMA = "gymrl.evaluation-plan.v1"

# Of a server's block: where it listens, not what it does.
_PLACEMENT = frozenset({"host", "port"})
_SHOWN_IDS = 10


class TaskKey(NamedTuple):
    """A task in an evaluation: the benchmark's label, and the digest of its input."""

    benchmark: str
    digest: str


class PlannedTask(msgspec.Struct, frozen=True):
    """One task of a plan.

    Attributes:
        key: Its identity.
        number: Its place in the plan, from 0.
        first_row: The place of its first attempt among all rows of the plan.
        task_id: Its id in the benchmark.
        repeats: Attempts to be made.
        group_size: Attempts that are made together; see :class:`BenchmarkPlan`.
        source: The row's ``task_source``, else the agent it names.
        row: The dataset row.
    """

    key: TaskKey
    number: int
    first_row: int
    task_id: str
    repeats: int
    group_size: int
    source: str
    row: dict[str, Any]


class BenchmarkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark of an evaluation.

    Attributes:
        label: Its name in this evaluation; unique.
        name: ``NAME`` or ``NAME/FLAVOR``.
        overrides: Configuration keys that were merged on top.
        repeats: Attempts at each task.
        plan: Ids and digests of the tasks, as ``gym eval plan`` has them.
        servers: The server instances that grade it, in Gym's shape.
        gym_version: The NeMo Gym whose own servers are among them; None: all are gymrl's.
        refusal: Why gymrl cannot start them; None: it can.
        group_size: Attempts at a task that its verifier compares with each other, and so waits for:
            they are made together, and count together or not at all. 1: each is graded alone.
        rows: Each task's row once, in the order of the dataset.
    """

    label: str
    name: str
    overrides: dict[str, Any] = {}
    repeats: int
    plan: EvalPlan
    servers: dict[str, Any] = {}
    gym_version: str | None = None
    refusal: str | None = None
    group_size: int = 1
    rows: list[dict[str, Any]]

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.repeats % self.group_size:
            raise ConfigError(
                f"benchmark {self.label!r}: repeats={self.repeats}: its verifier compares "
                f"{self.group_size} attempts at a task with each other (num_rollouts_per_prompt of "
                f"its server): ask for {self.group_size} repeats or a multiple of them, or override "
                "that number",
                setting="repeats",
            )

    def digests(self) -> dict[str, str]:
        """Each task's id and digest."""
        return {task.task_id.task_id: task.digest for task in self.plan.tasks}


class EvaluationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation, before any of it has run.

    Attributes:
        schema_name: The format, ``schema`` in JSON.
        gymrl_version: What made it.
        settings: Policy, sampling and seed.
        benchmarks: In the order they were asked for.
        config_digest: Of the settings and the servers; see :func:`config_digest`.
    """

    schema_name: str = msgspec.field(default=EVALUATION_PLAN_SCHEMA, name="schema")
    gymrl_version: str = __version__
    settings: EvaluationSettings
    benchmarks: tuple[BenchmarkPlan, ...]
    config_digest: str

    @classmethod
    def of(
        cls, settings: EvaluationSettings, benchmarks: tuple[BenchmarkPlan, ...]
    ) -> EvaluationPlan:
        """The plan with its digest.

        Raises:
            ConfigError: There is no benchmark, or two share a label.
        """
        require_labels([benchmark.label for benchmark in benchmarks])
        digest = config_digest(settings, benchmarks)
        return cls(settings=settings, benchmarks=benchmarks, config_digest=digest)

    def with_settings(self, settings: EvaluationSettings) -> EvaluationPlan:
        """The same tasks, asked otherwise."""
        return type(self).of(settings, self.benchmarks)

    @property
    def num_tasks(self) -> int:
        """Tasks of all benchmarks."""
        return sum(len(benchmark.plan.tasks) for benchmark in self.benchmarks)

    @property
    def num_rows(self) -> int:
        """Attempts to be made."""
        return sum(len(each.plan.tasks) * each.repeats for each in self.benchmarks)

    def tasks(self) -> Iterator[PlannedTask]:
        """Every task, benchmark by benchmark, in the order of the datasets."""
        number = first_row = 0
        for benchmark in self.benchmarks:
            digests = benchmark.digests()
            for row in benchmark.rows:
                task_id = str(row_task_id(row))
                yield PlannedTask(
                    key=TaskKey(benchmark.label, digests[task_id]),
                    number=number,
                    first_row=first_row,
                    task_id=task_id,
                    repeats=benchmark.repeats,
                    group_size=benchmark.group_size,
                    source=source_of(row, benchmark.label),
                    row=row,
                )
                number += 1
                first_row += benchmark.repeats

    def to_json(self) -> str:
        """The plan's file: two spaces, a newline at the end.

        Keys stay in their order: a prompt shows the order of a tool's parameters.
        """
        return json.dumps(msgspec.to_builtins(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, what: str = "the plan") -> EvaluationPlan:
        """Read what :meth:`to_json` wrote.

        Args:
            text: The file's content.
            what: How errors call it.

        Raises:
            ConfigError: It is no plan of an evaluation, of a version that is not known, or its
                parts do not fit each other: rows or settings were changed after it was made.
        """
        try:
            plan = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise ConfigError(f"{what} cannot be read: {error}", setting="plan") from error
        if plan.schema_name != EVALUATION_PLAN_SCHEMA:
            raise ConfigError(
                f"{what}: schema={plan.schema_name!r}; this gymrl reads {EVALUATION_PLAN_SCHEMA!r}",
                setting="schema",
            )
        plan._check(what)
        return plan

    def _check(self, what: str) -> None:
        for benchmark in self.benchmarks:
            planned = benchmark.digests()
            rows = {str(row_task_id(row)): task_digest(row) for row in benchmark.rows}
            differing = sorted(
                name for name in planned | rows if planned.get(name) != rows.get(name)
            )
            if differing or len(rows) != len(benchmark.rows):
                raise ConfigError(
                    f"{what}: benchmark {benchmark.label!r}: the rows are not those of the plan; "
                    f"they differ in the tasks {differing[:_SHOWN_IDS]}",
                    setting="rows",
                )
        found = config_digest(self.settings, self.benchmarks)
        if found != self.config_digest:
            raise ConfigError(
                f"{what}: its settings or servers are not those that its config_digest was made "
                f"of ({self.config_digest}, now {found}); make the plan again",
                setting="config_digest",
            )


def require_labels(labels: Sequence[str]) -> None:
    """Refuse an evaluation of nothing, and labels that two benchmarks share.

    Raises:
        ConfigError: Names the label.
    """
    if not labels:
        raise ConfigError("name at least one benchmark", setting="benchmarks")
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        raise ConfigError(
            f"benchmark {twice[0]!r} is named twice; give each a label of its own: easy={twice[0]}",
            setting="benchmarks",
        )


def source_of(row: dict[str, Any], label: str) -> str:
    """What a row's numbers are reported under: its ``task_source``, else its agent."""
    source = row.get("task_source")
    if isinstance(source, str) and source:
        return source
    agent = row.get("agent_ref")
    name = agent.get("name") if isinstance(agent, dict) else None
    return name if isinstance(name, str) and name else label


def config_digest(settings: EvaluationSettings, benchmarks: tuple[BenchmarkPlan, ...]) -> str:
    """``sha256:`` of everything that decides results, beside the tasks and their repeats.

    Policy, sampling, seed, and every benchmark's servers, with NeMo Gym's version where they are its
    own. Left out: where servers listen and which interpreter runs them, where a model directory lies
    (its fingerprint counts instead), how many rows run at a time, deadlines.
    """
    text = json.dumps(
        deciding_settings(settings, benchmarks), sort_keys=True, separators=(",", ":")
    )
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def deciding_settings(
    settings: EvaluationSettings, benchmarks: tuple[BenchmarkPlan, ...]
) -> dict[str, Any]:
    """What :func:`config_digest` is made of, as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(settings)
    if settings.policy.weights is not None:
        del plain["policy"]["model"]
    servers = {
        # Of servers that somebody else starts, only what was asked of them is known.
        each.label: {"overrides": each.overrides}
        if each.refusal is not None
        else _without_placement(each.servers) | _graded_by(each)
        for each in benchmarks
    }
    return {"settings": plain, "servers": servers}


def _graded_by(benchmark: BenchmarkPlan) -> dict[str, Any]:
    version = benchmark.gym_version
    return {} if version is None else {"nemo_gym_version": version}


def _without_placement(servers: dict[str, Any]) -> dict[str, Any]:
    return {
        instance: {
            kind: {
                impl: {name: value for name, value in block.items() if name not in _PLACEMENT}
                if isinstance(block, dict)
                else block
                for impl, block in impls.items()
            }
            if isinstance(impls, dict)
            else impls
            for kind, impls in kinds.items()
        }
        if isinstance(kinds, dict)
        else kinds
        for instance, kinds in servers.items()
    }
