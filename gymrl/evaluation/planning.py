"""``plan_evaluation``: from benchmarks' names to a plan that can be run anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.benchmark.keys import require_no_keys
from gymrl.benchmark.plan import row_task_id
from gymrl.benchmark.planned_servers import planned_servers
from gymrl.benchmark.planning import plan_benchmark
from gymrl.errors import ConfigError
from gymrl.evaluation.fingerprint import fingerprint_of
from gymrl.evaluation.plan import BenchmarkPlan, EvaluationPlan, require_labels
from gymrl.evaluation.settings import EvaluationSettings
from gymrl.evaluation.tasks import attempt_row
from gymrl.rollout.prepare import GroupSizes, prepare_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gymrl.benchmark.plan import PlannedBenchmark


class BenchmarkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark that is asked for.

    Attributes:
        name: ``NAME`` or ``NAME/FLAVOR``.
        label: Its name in this evaluation; None: `name`.
        overrides: Configuration keys merged on top, nested; they win over those for all benchmarks.
        task_ids: Only these tasks; None: all.
        repeats: Attempts at each task; None: as the evaluation says, else as the benchmark does.
    """

    name: str
    label: str | None = None
    overrides: dict[str, Any] = {}
    task_ids: tuple[str, ...] | None = None
    repeats: int | None = None


def plan_evaluation(
    benchmarks: Sequence[str | BenchmarkChoice],
    settings: EvaluationSettings | None = None,
    *,
    repeats: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    roots: Sequence[str | Path] = (),
    gym_python: str | None = None,
) -> EvaluationPlan:
    """Plan any number of benchmarks, and check that every row could be asked.

    It blocks while data is prepared: in an event loop, call it through
    ``anyio.to_thread.run_sync``. Nothing of the process is changed.

    Args:
        benchmarks: Names, or choices with a label, overrides and tasks of their own.
        settings: Policy, sampling and seed; None: the defaults, without a policy.
        repeats: Attempts at each task; None: as each benchmark says.
        overrides: Configuration keys merged on top of every benchmark's, nested.
        roots: Searched for benchmarks before all others.
        gym_python: The interpreter that has NeMo Gym, for benchmarks whose servers are its own;
            None: what :func:`~gymrl.benchmark.installed_gym.find_gym` finds.

    Raises:
        ConfigError: A name, a label, an override or a number is wrong, data cannot be prepared, or
            a model directory cannot be read.
        RowError, UnsupportedOptionError: A row cannot be asked as the settings say.
    """
    if isinstance(benchmarks, str):
        raise ConfigError(
            f"benchmarks={benchmarks!r}: a list of names is needed", setting="benchmarks"
        )
    chosen = [
        choice if isinstance(choice, BenchmarkChoice) else BenchmarkChoice(name=choice)
        for choice in benchmarks
    ]
    require_labels([choice.label or choice.name for choice in chosen])
    planned = tuple(
        _planned(choice, repeats, overrides or {}, roots, gym_python) for choice in chosen
    )
    plan = EvaluationPlan.of(with_fingerprint(settings or EvaluationSettings()), planned)
    check_rows(plan)
    return plan


def with_fingerprint(settings: EvaluationSettings) -> EvaluationSettings:
    """The settings with the fingerprint of their model, where that is a directory here.

    Raises:
        ConfigError: The directory cannot be read.
    """
    model = settings.policy.model
    directory = Path(model).expanduser() if model is not None else None
    if directory is None or not directory.is_dir():
        return settings
    policy = msgspec.structs.replace(settings.policy, weights=fingerprint_of(directory))
    return msgspec.structs.replace(settings, policy=policy)


def check_rows(plan: EvaluationPlan) -> None:
    """Refuse rows that could not be asked, before anything starts.

    Raises:
        RowError, UnsupportedOptionError, ConfigError: The first, with its benchmark and task.
    """
    for task in plan.tasks():
        where = f"benchmark {task.key.benchmark!r}, task {task.task_id!r}"
        try:
            row, sampling = attempt_row(task, 0, plan.settings)
            prepare_rows([row], sampling, GroupSizes(group=1), is_training=False)
        except (ConfigError, ValueError, TypeError) as error:
            if not hasattr(type(error), "rebuild"):
                raise
            message = str(error).removeprefix("row 0: ").removeprefix("row 0 ")
            raise type(error)(f"{where}: {message}", **getattr(error, "fields", {})) from error


def _planned(
    choice: BenchmarkChoice,
    repeats: int | None,
    overrides: Mapping[str, Any],
    roots: Sequence[str | Path],
    gym_python: str | None,
) -> BenchmarkPlan:
    merged = _merged(overrides, choice.overrides)
    require_no_keys(merged)
    planned = plan_benchmark(
        choice.name, choice.task_ids, merged, roots=roots, gym_python=gym_python
    )
    started = planned_servers(choice.name, merged, roots=roots, gym_python=gym_python)
    rows = _each_task_once(planned)
    count = choice.repeats if choice.repeats is not None else repeats
    if count is None:
        count = len(planned.rows) // len(rows)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"repeats={count!r}: must be a positive integer", setting="repeats")
    return BenchmarkPlan(
        label=choice.label or choice.name,
        name=choice.name,
        overrides=merged,
        repeats=count,
        plan=planned.plan,
        servers=started.servers,
        gym_version=started.gym_version,
        refusal=started.refusal,
        group_size=started.group_size,
        rows=rows,
    )


def _each_task_once(planned: PlannedBenchmark) -> list[dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for row in planned.rows:
        first.setdefault(str(row_task_id(row)), row)
    return list(first.values())


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in top.items():
        known = merged.get(name)
        both = isinstance(known, dict) and isinstance(value, dict)
        merged[name] = _merged(known, value) if both and isinstance(known, dict) else value
    return merged
