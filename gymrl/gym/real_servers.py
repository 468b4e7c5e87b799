"""Which real Gym servers a configuration asks for, by Gym's own rules.

How one runs is in :mod:`gymrl.gym.real_processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import ConfigError, RealServersError
from gymrl.gym.publication import POLICY_MODEL
from gymrl.gym.real_peer import __file__ as _PEER
from gymrl.gym.real_processes import environment, interpreter
from gymrl.gym.real_question import ask_gym
from gymrl.gym.real_ray import says_no_ray, why_ray
from gymrl.gym.registry import ENVIRONMENTS, MODELS, RELAY, RESOURCES, read_instances

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gymrl.config import GymConfig
    from gymrl.gym.registry import InstanceConfig

_OLDEST = (0, 4)
_DECLARES_RAY = (0, 7)
"""Servers of earlier versions start Ray always; from here on a class can say that it need not."""


class RealServers(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration as Gym reads it.

    Attributes:
        config: Includes and references resolved.
        directories: Where the implementation of each instance to start is.
        leave_ray: Those for which Gym would start Ray, though they have no use for it.
    """

    config: dict[str, Any]
    directories: dict[str, str]
    leave_ray: frozenset[str] = frozenset()


def asks_for_gym(config: GymConfig) -> bool:
    """Whether NeMo Gym has to read this configuration: it includes files, or names real servers.

    Raises:
        ConfigError: It does, and `gym_python` is not set.
    """
    if "config_paths" not in config.servers and (
        config.gym_python is None
        or not any(is_real(i) for i in read_instances(config.servers).values())
    ):
        return False
    if config.gym_python is None:
        raise ConfigError(
            "gym.servers includes Gym's own files (config_paths): set gym.gym_python to the "
            "interpreter that has NeMo Gym",
            setting="gym_python",
        )
    return True


def is_real(instance: InstanceConfig) -> bool:
    """Whether an instance is a script of a real Gym server."""
    entrypoint = instance.block.get("entrypoint")
    return isinstance(entrypoint, str) and entrypoint.endswith(".py")


async def read_by_gym(config: GymConfig, base_urls: Sequence[str], model_name: str) -> RealServers:
    """Have NeMo Gym read the configuration, in a process of its own.

    Args:
        config: The worker's configuration, with `gym_python`.
        base_urls: The policy's servers; empty: the configuration has its own.
        model_name: The policy's name.

    Raises:
        ConfigError: The interpreter has no NeMo Gym of a known version, or Gym refuses the
            configuration.
        RealServersError: An instance needs Ray; names it.
    """
    if config.token_source != "messages" and not config.servers.get("observability_enabled"):
        raise ConfigError(
            f"token_source={config.token_source!r}: Gym's own agents name their rollouts to the "
            "policy only where gym.servers sets observability_enabled (and model_call_capture_dir)",
            setting="token_source",
        )
    request = {
        "config": _request_config(config, base_urls, model_name),
        "policy": _policy_block(base_urls, model_name),
        "oldest": _OLDEST,
    }
    answer = await _ask_gym(config, request)
    if "config" not in answer:
        raise ConfigError(
            f"{config.gym_python} has NeMo Gym {answer['version']}; "
            f"{'.'.join(map(str, _OLDEST))} and newer can be started",
            setting="gym_python",
        )
    resolved: dict[str, Any] = answer["config"]
    for name, instance in read_instances(resolved).items():
        if instance.block.get("port") == -1:  # "none yet", of Gym's reading without a network
            del resolved[name][instance.kind][instance.impl]["port"]
    started = instances_to_start(resolved, base_urls)
    unknown = config.gym_pythons.keys() - started.keys()
    if unknown:
        raise ConfigError(
            f"gym_pythons names {', '.join(sorted(unknown))}, which is no server that is started; "
            f"those are: {', '.join(started)}",
            setting="gym_pythons",
        )
    leave_ray = _leave_ray(started, answer)
    directories = {name: answer["directories"][name] for name in started}
    return RealServers(config=resolved, directories=directories, leave_ray=leave_ray)


def instances_to_start(
    config: Mapping[str, Any], base_urls: Sequence[str]
) -> dict[str, InstanceConfig]:
    """The instances that become processes: all real ones but relays and a policy we stand in for."""
    return {
        name: instance
        for name, instance in read_instances(config).items()
        if is_real(instance) and not is_relay(instance) and not (name == POLICY_MODEL and base_urls)
    }


def is_relay(instance: InstanceConfig) -> bool:
    """Whether an instance only relays to its agent."""
    return instance.kind == ENVIRONMENTS and instance.impl == RELAY


def _request_config(config: GymConfig, base_urls: Sequence[str], model_name: str) -> dict[str, Any]:
    wanted: dict[str, Any] = {"default_host": config.host}
    if base_urls:
        wanted |= {
            "policy_base_url": base_urls[0],
            "policy_api_key": "none",
            "policy_model_name": model_name,
        }
    wanted |= config.servers
    for name, instance in read_instances(config.servers).items():
        is_override = "entrypoint" not in instance.block
        if instance.kind == RESOURCES and not is_override and not is_real(instance):
            # Gym wants a domain of every environment; ours need not have one.
            wanted[name] = {RESOURCES: {instance.impl: {"domain": "other", **instance.block}}}
    return wanted


def _policy_block(base_urls: Sequence[str], model_name: str) -> dict[str, Any]:
    block = {
        "entrypoint": "app.py",
        "base_url": base_urls[0] if base_urls else "",
        "api_key": "none",
        "model": model_name,
        "return_token_id_information": True,
    }
    return {MODELS: {"vllm_model": block}}


def _leave_ray(started: Mapping[str, InstanceConfig], answer: Mapping[str, Any]) -> frozenset[str]:
    """Refuse servers that need Ray; the names of those that only would start it."""
    version = tuple(int(part) for part in answer["version"].split(".")[:2])
    reasons, silent = [], set()
    for name, instance in started.items():
        entrypoint = instance.block["entrypoint"]
        directory = answer["directories"].get(name)
        if directory is None:
            raise ConfigError(
                f"instance {name!r}: no {instance.kind}/{instance.impl}/{entrypoint} in "
                f"{', '.join(answer['roots'])}",
                setting=name,
            )
        reason = why_ray(directory, entrypoint, answer["roots"])
        says_no = version >= _DECLARES_RAY and says_no_ray(directory, entrypoint, answer["roots"])
        if reason is None and not says_no:
            silent.add(name)
            if instance.block.get("num_workers") not in (None, 1):
                reason = (
                    f"it has num_workers={instance.block['num_workers']} and does not set "
                    "ray_enabled = False, so each of its processes would start Ray; set "
                    "num_workers to 1"
                )
        if reason is not None:
            reasons.append(f"{name} ({reason})")
    if reasons:
        raise RealServersError(
            f"gymrl starts no Ray, and these servers need it: {'; '.join(reasons)}. Run them "
            "yourself and give their registry: gym.registry_url of a run, registry_server of a "
            "TaskRunner",
            setting="servers",
        )
    return frozenset(silent)


async def _ask_gym(config: GymConfig, request: dict[str, Any]) -> dict[str, Any]:
    python = interpreter(config)
    answer = await ask_gym("NeMo Gym's reading", python, _PEER, request, environment(config))
    if "error" not in answer:
        return answer
    if answer["error"] in ("PackageNotFoundError", "ModuleNotFoundError"):
        raise ConfigError(
            f"gym_python={python!r} has no NeMo Gym that works: {answer['message']}",
            setting="gym_python",
        )
    # Some of Gym's errors say where they are in what is printed before them.
    said = f"\nIt wrote:\n{answer['said']}" if answer["said"] else ""
    raise ConfigError(
        f"NeMo Gym refuses the configuration: {answer['error']}: {answer['message']}{said}",
        setting="servers",
    )
