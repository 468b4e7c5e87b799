"""Benchmarks whose servers are NeMo Gym's own: which those are, and what Gym is asked to read."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.benchmark.dataset import POLICY_MODEL, server_instances
from gymrl.benchmark.installed_gym import GYM_PYTHON_VARIABLE
from gymrl.benchmark.roots import find_path
from gymrl.benchmark.settings import CONFIG_PATHS, plain_overrides, unresolved
from gymrl.errors import ConfigError, RealServersError
from gymrl.gym.registry import ENVIRONMENTS, MODELS, RELAY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omegaconf import DictConfig

    from gymrl.benchmark.roots import BenchmarkSource, SearchRoot
    from gymrl.gym.registry import InstanceConfig

RESPONSES_ENDPOINT = "openai_model"
"""The model type that needs no model server of Gym's: an endpoint with OpenAI's Responses API."""

_POLICY_KEYS = ("policy_base_url", "policy_api_key", "policy_model_name")


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    """How real servers are run.

    Attributes:
        servers: The configuration that Gym reads.
        python: The interpreter that has it.
        roots: Search roots before those that Gym knows.
        log_dir: Gets each server's output; None: no files.
        has_model_server: The policy's model server is one of them.
    """

    servers: dict[str, Any]
    python: str
    roots: tuple[str, ...] = ()
    log_dir: str | None = None
    has_model_server: bool = False


def real_instances(config: DictConfig) -> dict[str, str]:
    """The instances of a configuration that only NeMo Gym has the servers of, and their scripts."""
    return {
        name: instance.block["entrypoint"]
        for name, instance in sorted(server_instances(unresolved(config)).items())
        if _is_real(instance)
    }


def _is_real(instance: InstanceConfig) -> bool:
    entrypoint = instance.block.get("entrypoint")
    if instance.name == POLICY_MODEL or not isinstance(entrypoint, str):
        return False
    if instance.kind == ENVIRONMENTS and instance.impl == RELAY:
        return False
    if instance.kind == MODELS and "base_url" in instance.block:
        return False
    return entrypoint.endswith(".py") and instance.block.get("port") is None


def refuse_without_gym(real: Mapping[str, str]) -> RealServersError:
    """Gym's servers are needed (as of :func:`real_instances`), and there is no NeMo Gym."""
    return RealServersError(
        f"{_named(real)}, which need an interpreter that has NeMo Gym, and none was found: name it "
        f"(gym_python, or {GYM_PYTHON_VARIABLE}; scripts/nemo-gym-peer makes one); or start the "
        "benchmark with `gym env start` and give its registry server to TaskRunner; or name host "
        "and port of each such server that runs",
        setting=next(iter(real)),
    )


def refuse_real(real: Mapping[str, str]) -> RealServersError:
    """Gym's servers are needed (as of :func:`real_instances`) where only ours are started."""
    return RealServersError(
        f"{_named(real)}, which are not started here: serve the benchmark with `gymrl serve "
        "--benchmark`, serve_benchmark or `gym env start`, and give its registry",
        setting=next(iter(real)),
    )


def _named(real: Mapping[str, str]) -> str:
    named = ", ".join(f"{name} ({entrypoint})" for name, entrypoint in real.items())
    return f"these instances are NeMo Gym's own servers: {named}"


def gym_servers(
    source: BenchmarkSource,
    overrides: Mapping[str, Any],
    model_type: str,
    roots: Sequence[SearchRoot],
) -> dict[str, Any]:
    """What Gym is asked to read: the benchmark's file, the model server's, and the overrides.

    Where the model type needs no model server of Gym's, its keys are left out: gymrl's own relay
    stands for the policy and is alone in knowing its address and key.

    Raises:
        ConfigError: Gym has no such model type.
    """
    # Datasets are no part of serving, but Gym resolves what their paths are made of.
    servers = {"work_dir": ".", **source.presets, **plain_overrides(overrides)}
    paths = [str(source.file)]
    if model_type == RESPONSES_ENDPOINT:
        for key in _POLICY_KEYS:
            servers.pop(key, None)
    else:
        paths.append(_model_config(model_type, roots))
    servers[CONFIG_PATHS] = [*paths, *(servers.get(CONFIG_PATHS) or [])]
    return servers


def with_model_server(
    served: Mapping[str, Any],
    overrides: Mapping[str, Any],
    model_type: str,
    roots: Sequence[SearchRoot],
) -> dict[str, Any]:
    """What Gym is asked to read where its model server stands before servers of ours alone.

    Args:
        served: The instances of ours, resolved.
        overrides: The caller's; those of the policy are Gym's to read.
        model_type: Which model server.
        roots: Where Gym's configurations are looked up.

    Raises:
        ConfigError: Gym has no such model type.
    """
    plain = plain_overrides(overrides)
    policy = {key: plain[key] for key in (*_POLICY_KEYS, POLICY_MODEL) if key in plain}
    return {**served, **policy, CONFIG_PATHS: [_model_config(model_type, roots)]}


def _model_config(model_type: str, roots: Sequence[SearchRoot]) -> str:
    path = f"{MODELS}/{model_type}/configs/{model_type}.yaml"
    found = find_path(path, roots) if "/" not in model_type else None
    if found is not None:
        return str(found)
    known = sorted(
        {
            folder.name
            for root in roots
            for folder in (root.path / MODELS).glob("*")
            if (folder / "configs" / f"{folder.name}.yaml").is_file()
        }
    )
    close = difflib.get_close_matches(model_type, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"model_type={model_type!r}: {path} is in no search root.{hint} "
        f"There are: {', '.join(known) or RESPONSES_ENDPOINT}",
        setting="model_type",
    )
