"""The servers of a benchmark as a plan holds them: complete, so that they can be started elsewhere.

Where they are NeMo Gym's own, Gym reads the configuration, and what it read is written so that Gym
reads it again: three texts stand for the policy, which is known only when a run starts, and keys
stay in the environment.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from anyio.from_thread import start_blocking_portal

from gymrl.benchmark.dataset import compared_attempts
from gymrl.benchmark.installed_gym import find_gym
from gymrl.benchmark.keys import POLICY_KEY, WrittenKeys, is_key
from gymrl.benchmark.real import (
    RESPONSES_ENDPOINT,
    gym_servers,
    real_instances,
    refuse_without_gym,
)
from gymrl.benchmark.roots import find_benchmark, search_roots
from gymrl.benchmark.serving import served_instances
from gymrl.benchmark.settings import (
    checked_overrides,
    environment_file,
    load_config,
    unresolved,
)
from gymrl.config import GymConfig
from gymrl.errors import RealServersError
from gymrl.gym.publication import POLICY_MODEL
from gymrl.gym.real_servers import is_relay, read_by_gym
from gymrl.gym.registry import TASKSET_ROUTES, read_instances

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gymrl.benchmark.installed_gym import InstalledGym

_POLICY = {
    "policy_base_url": "http://policy-base-url.gymrl.invalid/v1",
    "policy_api_key": POLICY_KEY,
    "policy_model_name": "gymrl-policy-model-name",
}
"""Texts that stand for the policy while a plan is made."""

_NOT_PLANNED = re.compile(
    r"config_paths|work_dir|prepare_script_args|task_ids_from|use_cached_prepared_benchmarks|"
    r"policy_.*|default_host|head_server|port_range_.*|.*_timeout_seconds"
)
"""Keys of a run that say where and how, not what."""


class PlannedServers(msgspec.Struct, frozen=True):
    """What a benchmark's run starts.

    Attributes:
        servers: In Gym's shape; fits ``GymConfig.servers``.
        gym_version: The NeMo Gym that read them; None: they are gymrl's own.
        refusal: Why they cannot be started, and `servers` is empty; None: they can.
        group_size: Attempts at a task that the verifier compares with each other, and so waits for.
    """

    servers: dict[str, Any]
    gym_version: str | None = None
    refusal: str | None = None
    group_size: int = 1


def planned_servers(
    benchmark: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    roots: Sequence[str | Path] = (),
    gym_python: str | None = None,
) -> PlannedServers:
    """The server instances of a benchmark, without the policy's.

    It blocks while an interpreter is asked.

    Args:
        benchmark: ``NAME`` or ``NAME/FLAVOR``.
        overrides: As for :func:`~gymrl.benchmark.serving.serve_benchmark`; the policy's keys need not
            be among them.
        roots: Searched for benchmarks and servers before all others.
        gym_python: The interpreter that has NeMo Gym; None: what
            :func:`~gymrl.benchmark.installed_gym.find_gym` finds.

    Returns:
        With a refusal where servers of NeMo Gym's own are needed, and there is no NeMo Gym, they need
        Ray, or a key is written out in their configuration.

    Raises:
        ConfigError: The name or the configuration is wrong.
    """
    checked = checked_overrides(overrides)
    gym = find_gym(gym_python)
    places = search_roots(roots, gym)
    source = find_benchmark(benchmark, places)
    config = load_config(source, places, checked, dict.fromkeys(_POLICY, ""))
    group_size = compared_attempts(config)
    real = real_instances(config)
    written, local = unresolved(config), environment_file(places)
    try:
        if not real:
            served = served_instances(config)
            keys = WrittenKeys.of(served, written, local)
            return PlannedServers(keys.restated(served, written), group_size=group_size)
        if gym is None:
            raise refuse_without_gym(real)
        asked = {**gym_servers(source, checked, RESPONSES_ENDPOINT, places), **_POLICY}
        servers = restated(_read_by(gym, asked, roots), written, local)
    except RealServersError as error:
        return PlannedServers({}, refusal=error.message, group_size=group_size)
    return PlannedServers(servers, gym.version, group_size=group_size)


def _read_by(
    gym: InstalledGym, asked: dict[str, Any], roots: Sequence[str | Path]
) -> dict[str, Any]:
    """The configuration as Gym resolves it."""
    gym_config = GymConfig(
        servers=asked, gym_python=gym.python, gym_roots=tuple(str(root) for root in roots)
    )
    base_urls = [_POLICY["policy_base_url"]]
    with start_blocking_portal("asyncio") as portal:
        read = portal.call(
            partial(read_by_gym, gym_config, base_urls, _POLICY["policy_model_name"])
        )
    return read.config


def restated(
    read: Mapping[str, Any], written: Mapping[str, Any], local: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A configuration that Gym has read, so that Gym gets the same out of it when a run starts.

    Args:
        read: As Gym has resolved it; not changed.
        written: The same with its references, where keys are looked up.
        local: The content of an ``env.yaml``, which is read again where the plan is run.

    Raises:
        RealServersError: A key is written out in it; names the place, not the key.
    """
    local = local or {}
    instances = read_instances(read)
    routes = read.get(TASKSET_ROUTES)
    routed = set(routes.values()) if isinstance(routes, dict) else set()
    kept: dict[str, Any] = {}
    for name, instance in instances.items():
        # Nobody runs a relay: its agent answers in its place.
        if name == POLICY_MODEL or (is_relay(instance) and name not in routed):
            continue
        block = {key: value for key, value in instance.block.items() if key != "datasets"}
        if "port" not in block:
            block.pop("host", None)  # of a server that is yet to be started
        kept[name] = {instance.kind: {instance.impl: block}}
    kept |= {
        name: value
        for name, value in read.items()
        if name not in instances
        and name in written
        and not _NOT_PLANNED.fullmatch(name)
        and not (name in local and is_key(name, value))
    }
    keys = WrittenKeys.of(kept, written, local)
    again: dict[str, Any] = keys.restated(kept, written, _as_it_stands)
    return again


def _as_it_stands(text: str) -> str:
    """A resolved text, written so that it is read as it is; the policy's are references again."""
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    for name, placeholder in _POLICY.items():
        text = text.replace(placeholder, f"${{{name}}}")
    return text
