"""From command-line options to what is run: rows, and a checked configuration.

Precedence, highest first: an option given on the command line, the ``--config`` file, what the
benchmark suggests, gymrl's defaults.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import msgspec

from gymrl.benchmark import list_benchmarks, load_benchmark, read_rows, read_servers
from gymrl.cli.assignments import parsed_value
from gymrl.config import RolloutConfig, SamplingParams, read_mapping
from gymrl.errors import ConfigError
from gymrl.rollout.prepare import GroupSizes, prepare_rows

DEFAULT_NUM_PROMPTS = 8
DEFAULT_SEED = 0


class RolloutOptions(msgspec.Struct, kw_only=True, frozen=True):
    """What the command line said; None where it said nothing."""

    target: str
    model: str | None = None
    base_urls: tuple[str, ...] = ()
    api_key_env: str | None = None
    model_name: str | None = None
    tokenizer: str | None = None
    servers: Path | None = None
    registry: str | None = None
    config: Path | None = None
    params: tuple[str, ...] = ()
    num_prompts: int | None = None
    num_generations: int = 1
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    workers: int | None = None
    in_process: bool = False
    batch_size: int | None = None
    dtype: str | None = None
    backend: str | None = None
    failure_policy: str | None = None
    token_source: str | None = None
    side_calls: str | None = None


class RolloutPlan(msgspec.Struct, kw_only=True, frozen=True):
    """What is run.

    Attributes:
        name: Of the benchmark, or of the file.
        rows: One dataset row a prompt.
        num_generations: Rows of each group.
        config: Of the engine.
        asks_model_name: Nobody named the model of the policy servers; they are asked.
    """

    name: str
    rows: tuple[dict[str, Any], ...]
    num_generations: int
    config: RolloutConfig
    asks_model_name: bool = False

    @property
    def num_rows(self) -> int:
        """Attempts to be made."""
        return len(self.rows) * self.num_generations


class _Tasks(msgspec.Struct, frozen=True):
    name: str
    rows: tuple[dict[str, Any], ...]
    servers: dict[str, Any]
    sampling: SamplingParams
    token_source: str = "messages"
    group_size: int = 1


def parse_params(params: tuple[str, ...]) -> dict[str, Any]:
    """``key=value`` pairs; a value is read as YAML, so that 3, true and [1, 2] are what they seem.

    Raises:
        ConfigError: No ``=``, an empty key, a key given twice, or a value that does not parse.
    """
    values: dict[str, Any] = {}
    for param in params:
        key, separator, text = param.partition("=")
        if not separator or not key:
            raise ConfigError(f"--param {param!r}: write it as key=value", setting="--param")
        if key in values:
            raise ConfigError(f"--param {key} is given twice", setting="--param")
        values[key] = parsed_value(text, "--param", param)
    return values


def _is_file(target: str) -> bool:
    return target.endswith((".jsonl", ".json")) or Path(target).is_file()


def _tasks(options: RolloutOptions, seed: int) -> _Tasks:
    target = options.target
    if _is_file(target):
        if options.params:
            raise ConfigError(
                "--param sets a shipped benchmark's parameters; a file of rows has none",
                setting="--param",
            )
        rows = read_rows(target, options.num_prompts)
        return _Tasks(Path(target).stem, tuple(rows), {}, SamplingParams())
    count = DEFAULT_NUM_PROMPTS if options.num_prompts is None else options.num_prompts
    try:
        benchmark = load_benchmark(
            target, num_tasks=count, seed=seed, params=parse_params(options.params)
        )
    except ConfigError as error:
        near = difflib.get_close_matches(target, [b.name for b in list_benchmarks()], n=1)
        if near or error.setting != "benchmark" or "no benchmark" not in error.message:
            raise
        raise ConfigError(
            f"{error.message} A file of rows must end in .jsonl or exist.", setting="benchmark"
        ) from None
    return _Tasks(
        benchmark.name,
        benchmark.rows,
        benchmark.servers,
        benchmark.sampling,
        benchmark.token_source,
        benchmark.group_size,
    )


def _generation_block(options: RolloutOptions, base: dict[str, Any]) -> dict[str, Any] | None:
    given = {
        "model": options.model,
        "dtype": options.dtype,
        "max_batch_size": options.batch_size,
        "backend": options.backend,
        "served_model_name": options.model_name if options.model else None,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    block = base.get("generation")
    if options.base_urls:
        if options.model:
            raise ConfigError(
                "--model loads a model here and --base-url asks one that is served elsewhere: "
                "give one of them (--model-name and --tokenizer go with --base-url)",
                setting="--model",
            )
        block = None
    if block is None and not options.model:
        if changes:
            flags = {"dtype": "--dtype", "max_batch_size": "--batch-size", "backend": "--backend"}
            flag = flags[next(iter(changes))]
            raise ConfigError(f"{flag} needs --model: it is a setting of a model loaded here")
        return None
    block = {**(block or {}), **changes}
    check_batch_size(options.batch_size, block.get("backend"))
    return block


def check_batch_size(batch_size: int | None, backend: str | None) -> None:
    """Refuse a batch size that the backend would not keep to.

    Raises:
        ConfigError: The command line gives one, and vLLM is what samples.
    """
    if batch_size is not None and backend == "vllm":
        raise ConfigError(
            f"--batch-size {batch_size} is the embedded generator's; vLLM decodes as many sequences as its "
            f"memory takes, or generation.vllm.engine_args: {{max_num_seqs: {batch_size}}} in a --config",
            setting="--batch-size",
        )


def _gym_block(options: RolloutOptions, base: dict[str, Any], tasks: _Tasks) -> dict[str, Any]:
    block: dict[str, Any] = dict(base.get("gym") or {})
    if options.servers and options.registry:
        raise ConfigError(
            "--servers starts servers here and --registry names some that run: give one of them",
            setting="--servers",
        )
    if options.registry:
        block |= {"registry_url": options.registry, "servers": {}}
    elif options.servers:
        block |= {"registry_url": None, "servers": read_servers(options.servers)}
    if not block.get("registry_url"):
        block["servers"] = {**tasks.servers, **(block.get("servers") or {})}
        block.setdefault("token_source", tasks.token_source)
        if not block["servers"]:
            raise ConfigError(
                f"{options.target} holds rows but no servers: add --servers servers.yaml to start "
                "them, or --registry URL of servers that run",
                setting="--servers",
            )
    if options.base_urls:
        block["base_urls"] = list(options.base_urls)
    elif options.model:
        block.pop("base_urls", None)
        block.pop("api_key_env", None)
    if options.api_key_env:
        if not block.get("base_urls"):
            raise ConfigError(
                "--api-key-env names the key of a policy server: add its --base-url",
                setting="--api-key-env",
            )
        block["api_key_env"] = options.api_key_env
    if options.model_name:
        block["model_name"] = options.model_name
    if options.tokenizer:
        block["tokenizer"] = options.tokenizer
    return {**block, **_token_settings(options, block)}


def _token_settings(options: RolloutOptions, block: dict[str, Any]) -> dict[str, Any]:
    """Where tokens come from, as far as the command line says."""
    given = {"token_source": options.token_source, "side_calls": options.side_calls}
    settings = {name: value for name, value in given.items() if value is not None}
    source = {**block, **settings}.get("token_source", "messages")
    if options.side_calls and source != "ledger":
        raise ConfigError(
            f"--side-calls {options.side_calls} is for trajectories that come from the policy "
            "server's ledger: add --token-source ledger",
            setting="--side-calls",
        )
    return settings


def _sampling_block(options: RolloutOptions, base: dict[str, Any], tasks: _Tasks) -> dict[str, Any]:
    given = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_tokens": options.max_output_tokens,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    suggested = msgspec.to_builtins(tasks.sampling)
    return {**suggested, **(base.get("sampling") or {}), **changes}


def _read_config(path: Path | None) -> dict[str, Any]:
    """The file of ``--config``; its blocks are mappings."""
    base = read_mapping(path) if path else {}
    for name in ("generation", "gym", "sampling"):
        if not isinstance(base.get(name) or {}, dict):
            raise ConfigError(
                f"{path}: {name} holds a {type(base[name]).__name__}; a mapping is needed",
                setting=name,
            )
    servers = (base.get("gym") or {}).get("servers") or {}
    if not isinstance(servers, dict):
        raise ConfigError(
            f"{path}: gym.servers holds a {type(servers).__name__}; a mapping is needed",
            setting="gym.servers",
        )
    return base


def _in_file(error: ConfigError, options: RolloutOptions, base: dict[str, Any]) -> ConfigError:
    """The error with the name of the file, where the setting is one of the file's."""
    values: Any = base
    for name in (error.setting or "").partition("[")[0].split("."):
        if not isinstance(values, dict) or name not in values:
            return error
        values = values[name]
    return ConfigError(f"{options.config}: {error}", setting=error.setting)


def make_plan(options: RolloutOptions) -> RolloutPlan:
    """Read the files, make the rows and build the configuration.

    Raises:
        RowError, UnsupportedOptionError: A row, or a way of sampling, that Gym can't be asked for.
        ConfigError: Anything about the options, the files or the values that can't be run; names
            the option or the setting and what to do.
    """
    if options.num_generations <= 0:
        raise ConfigError(
            f"--num-generations {options.num_generations}: must be positive",
            setting="--num-generations",
        )
    base = _read_config(options.config)
    seed = options.seed if options.seed is not None else base.get("seed", DEFAULT_SEED)
    tasks = _tasks(options, DEFAULT_SEED if seed is None else seed)
    if options.num_generations % tasks.group_size:
        raise ConfigError(
            f"--num-generations {options.num_generations}: {tasks.name} scores {tasks.group_size} "
            f"attempts at a prompt against each other; ask for a multiple of {tasks.group_size}",
            setting="--num-generations",
        )
    values = {
        **base,
        "generation": _generation_block(options, base),
        "gym": _gym_block(options, base, tasks),
        "sampling": _sampling_block(options, base, tasks),
        "seed": seed,
        "failure_policy": options.failure_policy or base.get("failure_policy", "mask"),
    }
    if options.workers is not None:
        values["num_workers"] = options.workers
    if options.in_process:
        values["in_process"] = True
    gym = values["gym"]
    if values["generation"] is None and not (gym.get("base_urls") or gym.get("registry_url")):
        raise ConfigError(
            "no model: give --model (a directory, a hub id or smollm2), or --base-url of a server "
            "that returns token ids",
            setting="--model",
        )
    try:
        config = RolloutConfig.from_dict(values)
    except ConfigError as error:
        raise _in_file(error, options, base) from None
    if config.gym.token_source != "messages" and not (config.generation or config.gym.base_urls):
        raise ConfigError(
            f"--token-source {config.gym.token_source} reads the policy server's ledger, and the "
            "servers of --registry know their policy alone: add its --base-url",
            setting="--token-source",
        )
    # What is wrong with a row or the sampling is said now, not after the model was loaded.
    prepare_rows(tasks.rows, config.sampling, GroupSizes(group=1), seed=config.seed)
    return RolloutPlan(
        name=tasks.name,
        rows=tasks.rows,
        num_generations=options.num_generations,
        config=config,
        asks_model_name=bool(config.gym.base_urls) and "model_name" not in values["gym"],
    )
