"""``plan_benchmark``: from a benchmark's name to its plan and the rows to run."""

from __future__ import annotations

import contextlib
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.benchmark.dataset import benchmark_dataset, prepared_file, read_dataset, repeated
from gymrl.benchmark.installed_gym import find_gym
from gymrl.benchmark.plan import (
    PlanBenchmark,
    PlanGym,
    PlannedBenchmark,
    build_plan,
    materialized,
    row_task_id,
)
from gymrl.benchmark.prepare import run_in_gym, run_prepare_script
from gymrl.benchmark.real import real_instances
from gymrl.benchmark.roots import find_benchmark, gym_version, search_roots
from gymrl.benchmark.settings import checked_overrides, load_config, value_of
from gymrl.benchmark.task_ids import TASK_IDS_FROM, with_task_ids
from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from omegaconf import DictConfig

    from gymrl.benchmark.installed_gym import InstalledGym
    from gymrl.benchmark.roots import SearchRoot

COLLATED_FILE = "benchmark.jsonl"

_NO_POLICY = {"policy_base_url": "", "policy_api_key": "", "policy_model_name": ""}


def plan_benchmark(
    benchmark: str,
    task_ids: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    work_dir: Path | None = None,
    *,
    roots: Sequence[str | Path] = (),
    gym_python: str | None = None,
) -> PlannedBenchmark:
    """Find the benchmark, prepare its data, plan it and collate its rows.

    Reads no command line and keeps nothing in the process, so a long-lived one can call it. It
    blocks: in an event loop, call it through ``anyio.to_thread.run_sync``.

    Args:
        benchmark: ``NAME`` or ``NAME/FLAVOR``.
        task_ids: Only these tasks; None: all.
        overrides: Configuration keys merged on top, nested like the configuration's own; a dotted
            key is refused, because it would be one literal key here but a path on a command line.
            The benchmark's prepare script sees them as its configuration while it runs.
        work_dir: Gets the collated rows (``benchmark.jsonl``); is ``${work_dir}`` in the
            configuration. None: a temporary folder, which is gone after.
        roots: Searched for benchmarks before all others.
        gym_python: The interpreter that has NeMo Gym, whose benchmarks are searched too; None:
            what :func:`~gymrl.benchmark.installed_gym.find_gym` finds. A benchmark of servers of
            Gym's own is prepared there, in a process of its own.

    Raises:
        ConfigError: The name, the configuration, the overrides or the ids are wrong; a task has no
            id of its own or shares it; the data cannot be prepared.
    """
    checked = checked_overrides(overrides)
    if isinstance(task_ids, str):
        raise ConfigError(
            f"task_ids={task_ids!r}: a list of ids is needed, not one text", setting="task_ids"
        )
    gym = find_gym(gym_python)
    places = search_roots(roots, gym)
    source = find_benchmark(benchmark, places)
    version, commit = gym_version(source, gym)
    with _work_folder(work_dir) as folder:
        config = load_config(source, places, {**checked, "work_dir": str(folder)}, _NO_POLICY)
        dataset = benchmark_dataset(config)
        run = partial(_prepare, gym, places, bool(real_instances(config)))
        rows = with_task_ids(
            read_dataset(dataset, prepared_file(dataset, places, config, run), places),
            value_of(config, TASK_IDS_FROM),
        )
        plan = build_plan(
            rows,
            benchmark=PlanBenchmark(dataset.name, [source.config_path]),
            taskset=dataset.taskset or dataset.name,
            gym=PlanGym(version, commit),
            selected_task_ids=task_ids,
        )
        planned = {task.task_id.task_id for task in plan.tasks}
        chosen = [row for row in rows if row_task_id(row) in planned]
        if dataset.taskset is not None and dataset.taskset in _taskset_routes(config):
            chosen = [materialized(row, dataset.taskset) for row in chosen]
        collated = repeated(chosen, dataset.num_repeats)
        if work_dir is not None:
            lines = [msgspec.json.encode(row) for row in collated]
            (folder / COLLATED_FILE).write_bytes(b"".join(line + b"\n" for line in lines))
    return PlannedBenchmark(plan, collated)


def _taskset_routes(config: DictConfig) -> dict[str, Any]:
    routes = value_of(config, "environment_server_routes")
    return routes if isinstance(routes, dict) else {}


def _prepare(
    gym: InstalledGym | None,
    places: Sequence[SearchRoot],
    is_gyms: bool,
    script: Path,
    arguments: dict[str, Any],
    config: dict[str, Any],
) -> Path:
    """Run a prepare script where what it imports is: here, or in Gym's interpreter."""
    folders = [place.path for place in places]
    if gym is None or gym.is_ours:
        return run_prepare_script(script, folders, arguments, config)
    if is_gyms or script.is_relative_to(gym.folder):
        return run_in_gym(gym, script, folders, arguments, config)
    # What is installed for another interpreter must not be found from this one.
    return run_prepare_script(script, [f for f in folders if f != gym.folder], arguments, config)


@contextlib.contextmanager
def _work_folder(work_dir: Path | None) -> Iterator[Path]:
    if work_dir is None:
        with tempfile.TemporaryDirectory(prefix="gymrl-plan-") as temporary:
            yield Path(temporary).resolve()
        return
    folder = Path(work_dir).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"work_dir={str(work_dir)!r}: {error}", setting="work_dir") from error
    yield folder
