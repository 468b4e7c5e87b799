"""The rows of a benchmark's dataset: found in the configuration, prepared, prompted, collated."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
from omegaconf.errors import OmegaConfBaseException

from gymrl.benchmark.files import read_rows
from gymrl.benchmark.roots import find_path
from gymrl.benchmark.settings import resolved, unresolved, value_of
from gymrl.config import read_mapping
from gymrl.errors import ConfigError
from gymrl.gym.registry import AGENTS, RESOURCES, read_instances

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from omegaconf import DictConfig

    from gymrl.benchmark.roots import SearchRoot
    from gymrl.gym.registry import InstanceConfig

POLICY_MODEL = "policy_model"
_CACHED = "use_cached_prepared_benchmarks"
_COMPARED = "num_rollouts_per_prompt"


class BenchmarkDataset(msgspec.Struct, frozen=True, kw_only=True):
    """The dataset block that makes a configuration a benchmark.

    Attributes:
        name: The benchmark's name.
        jsonl_fpath: Where the rows lie, or will once they are prepared.
        instance: The server instance that declares it, which is its rows' ``task_source``.
        prepare_script: Writes the file; None: it is there.
        prepare_script_args: Arguments of its ``prepare``; those at the top of a configuration win.
        prepare_dependencies: Packages that the script wants beside NeMo Gym.
        prompt_config: A file with the prompt to put the rows' fields into.
        num_repeats: How often each row stands in the collated rows.
        agent: The agent that serves the rows, where `instance` leaves a choice.
        taskset: Of the tasks' ids; None: `name`.
    """

    name: str
    jsonl_fpath: str
    instance: str = ""
    prepare_script: str | None = None
    prepare_script_args: dict[str, Any] | None = None
    prepare_dependencies: list[str] | None = None
    prompt_config: str | None = None
    num_repeats: int = 1
    agent: str | None = None
    taskset: str | None = None


def server_instances(config: Mapping[str, Any]) -> dict[str, InstanceConfig]:
    """The server instances of a configuration but the policy, whose place is a caller's to fill."""
    return read_instances({name: v for name, v in config.items() if name != POLICY_MODEL})


def benchmark_dataset(config: DictConfig) -> BenchmarkDataset:
    """The one dataset of type ``benchmark``, its interpolations resolved.

    Raises:
        ConfigError: There is none, or several; or the block is not as it should be.
    """
    instance, index = _declaring(server_instances(unresolved(config)))
    node = config[instance.name][instance.kind][instance.impl]["datasets"][index]
    what = f"the dataset of {instance.name!r}"
    block = resolved(node, what)
    try:
        dataset = msgspec.convert(block | {"instance": instance.name}, BenchmarkDataset)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {error}", setting="datasets") from error
    if dataset.num_repeats < 1:
        raise ConfigError(
            f"{what}: num_repeats={dataset.num_repeats}: must be positive", setting="num_repeats"
        )
    return dataset


def _declaring(instances: Mapping[str, InstanceConfig]) -> tuple[InstanceConfig, int]:
    """The instance that declares the benchmark's dataset, and which of its datasets that is."""
    found = [
        (instance, index)
        for instance in instances.values()
        if instance.kind in (AGENTS, RESOURCES)
        for index, block in enumerate(_datasets_of(instance))
        if isinstance(block, dict) and block.get("type") == "benchmark"
    ]
    if len(found) != 1:
        raise ConfigError(
            f"A plan covers exactly one benchmark, but the config declares {len(found)}"
            + "".join(f"; one at {instance.name!r}" for instance, _ in found),
            setting="datasets",
        )
    return found[0]


def _datasets_of(instance: InstanceConfig) -> list[Any]:
    datasets = instance.block.get("datasets") or []
    if not isinstance(datasets, list):
        raise ConfigError(
            f"{instance.name!r}: datasets={datasets!r}: a list of blocks is needed",
            setting="datasets",
        )
    return datasets


def compared_attempts(config: DictConfig) -> int:
    """How many attempts at a task its verifier compares with each other, and so waits for.

    Such a resources server says ``num_rollouts_per_prompt``. 1: attempts are graded one by one.

    Raises:
        ConfigError: There is not one dataset, or the number is none.
    """
    instances = server_instances(unresolved(config))
    instance, _ = _declaring(instances)
    verifier: InstanceConfig | None = instance
    if instance.kind == AGENTS:
        verifier = instances.get(instance.reference("resources_server") or "")
    if verifier is None or _COMPARED not in verifier.block:
        return 1
    block = config[verifier.name][verifier.kind][verifier.impl]
    try:
        number = block[_COMPARED]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{verifier.name!r}: {_COMPARED}: {error}", setting=_COMPARED) from error
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(
            f"{verifier.name!r}: {_COMPARED}={number!r}: must be a positive integer",
            setting=_COMPARED,
        )
    return number


def prepared_file(
    dataset: BenchmarkDataset,
    roots: Sequence[SearchRoot],
    config: DictConfig,
    run: Callable[[Path, dict[str, Any], dict[str, Any]], Path],
) -> Path:
    """Run the dataset's prepare script, if it has one, and say where its rows are.

    With ``use_cached_prepared_benchmarks`` in the configuration a file that is there is taken as it is.

    Args:
        dataset: The dataset.
        roots: Where its files are looked up.
        config: What the script sees as its configuration.
        run: Runs a script, given its file, its arguments and the configuration.

    Raises:
        ConfigError: The script is not there, or failed, or wrote another file than ``jsonl_fpath``;
            or without a script the file is not there.
    """
    file = find_path(dataset.jsonl_fpath, roots)
    if file is not None and value_of(config, _CACHED) is True:
        return file
    if dataset.prepare_script is None:
        if file is None:
            raise ConfigError(
                f"dataset {dataset.name!r}: {dataset.jsonl_fpath} is not there, and no "
                "prepare_script makes it",
                setting="jsonl_fpath",
            )
        return file
    script = find_path(dataset.prepare_script, roots)
    if script is None:
        raise ConfigError(
            f"dataset {dataset.name!r} is missing a valid prepare script: "
            f"{dataset.prepare_script} is under none of: {', '.join(str(r.path) for r in roots)}",
            setting="prepare_script",
        )
    arguments = {**(dataset.prepare_script_args or {}), **_arguments(config)}
    try:
        returned = run(script, arguments, unresolved(config)).resolve()
    except ConfigError as error:
        if not dataset.prepare_dependencies:
            raise
        needed = " ".join(dataset.prepare_dependencies)
        raise ConfigError(
            f"{error.message}; the dataset says that its script needs: {needed}",
            setting="prepare_dependencies",
        ) from error
    expected = [(r.path / dataset.jsonl_fpath).resolve() for r in roots]
    if returned not in expected:
        raise ConfigError(
            f"dataset {dataset.name!r}: its prepare script wrote {returned}, but jsonl_fpath is "
            f"{dataset.jsonl_fpath}; they must be the same file",
            setting="jsonl_fpath",
        )
    return returned


def _arguments(config: DictConfig) -> dict[str, Any]:
    """Where NeMo Gym has a prepare script's arguments: at the top of the configuration."""
    given = value_of(config, "prepare_script_args") or {}
    if not isinstance(given, dict):
        raise ConfigError(
            f"prepare_script_args={given!r}: a mapping is needed", setting="prepare_script_args"
        )
    return {str(name): value for name, value in given.items()}


def read_dataset(
    dataset: BenchmarkDataset, file: Path, roots: Sequence[SearchRoot]
) -> list[dict[str, Any]]:
    """The dataset's rows, each once, with their prompt and where they go.

    Raises:
        ConfigError: The file holds no rows, or the prompt does not fit them.
    """
    rows = read_rows(file)
    if dataset.prompt_config is not None:
        rows = _prompted(rows, dataset, roots)
    stamped = []
    for row in rows:
        routed = {name: value for name, value in row.items() if name != "agent_ref"}
        routed["task_source"] = dataset.instance
        if dataset.agent is not None:
            routed["agent_ref"] = {"type": AGENTS, "name": dataset.agent}
        stamped.append(routed)
    return stamped


def repeated(rows: Sequence[dict[str, Any]], num_repeats: int) -> list[dict[str, Any]]:
    """Each row `num_repeats` times in a row (aabbcc), every one a dictionary of its own."""
    return [copy.deepcopy(row) for row in rows for _ in range(num_repeats)]


def _prompted(
    rows: list[dict[str, Any]], dataset: BenchmarkDataset, roots: Sequence[SearchRoot]
) -> list[dict[str, Any]]:
    where = f"dataset {dataset.name!r}: prompt_config {dataset.prompt_config}"
    file = find_path(str(dataset.prompt_config), roots)
    if file is None:
        raise ConfigError(f"{where} is not there", setting="prompt_config")
    prompt = read_mapping(file)
    user, system = prompt.get("user"), prompt.get("system")
    if not isinstance(user, str) or not isinstance(system, str | None):
        raise ConfigError(
            f"{where}: user must be a text, and so must system where it is given",
            setting="prompt_config",
        )
    templates = [("system", system), ("user", user)] if system is not None else [("user", user)]
    prompted = []
    for index, row in enumerate(rows):
        params = row.get("responses_create_params") or {}
        if not isinstance(params, dict):
            raise ConfigError(
                f"{file.name}: row {index}: responses_create_params is no mapping", setting="rows"
            )
        if params.get("input") is not None:
            raise ConfigError(
                f"{where}: Some rows have responses_create_params.input but prompt_config is also "
                f"specified, e.g. row {index}; give one of them",
                setting="prompt_config",
            )
        try:
            messages = [
                {"role": role, "content": template.format_map(row)} for role, template in templates
            ]
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{where}: row {index} does not fit: {type(error).__name__}: {error}",
                setting="prompt_config",
            ) from error
        prompted.append(row | {"responses_create_params": params | {"input": messages}})
    return prompted
