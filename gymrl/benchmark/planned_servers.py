"""The servers of a benchmark as a plan holds them: complete, so that they can be started elsewhere.

Where they are NeMo Gym's own, Gym reads the configuration, and what it read is written so that Gym
reads it again: three texts stand for the policy, which is known only when a run starts, and keys
stay in the environment.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from anyio.from_thread import start_blocking_portal

from gymrl.benchmark.dataset import compared_attempts
from gymrl.benchmark.installed_gym import find_gym
from gymrl.benchmark.real import (
    RESPONSES_ENDPOINT,
    gym_servers,
    real_instances,
    refuse_without_gym,
)
from gymrl.benchmark.roots import find_benchmark, search_roots
from gymrl.benchmark.serving import served_instances
from gymrl.benchmark.settings import checked_overrides, load_config, unresolved
from gymrl.config import GymConfig
from gymrl.errors import RealServersError
from gymrl.gym.publication import POLICY_MODEL
from gymrl.gym.real_servers import is_relay, read_by_gym
from gymrl.gym.registry import TASKSET_ROUTES, read_instances

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from gymrl.benchmark.installed_gym import InstalledGym

_POLICY = {
    "policy_base_url": "http://policy-base-url.gymrl.invalid/v1",
    "policy_api_key": "gymrl-policy-api-key",
    "policy_model_name": "gymrl-policy-model-name",
}
"""Texts that stand for the policy while a plan is made."""

_NOT_PLANNED = re.compile(
    r"config_paths|work_dir|prepare_script_args|task_ids_from|use_cached_prepared_benchmarks|policy_.*|default_host|head_server|port_range_.*|.*_timeout_seconds"
)
"""Keys of a run that say where and how, not what."""

_KEY = re.compile(r"api_?key|secret|password|authorization|(hf|auth|access)_token$", re.IGNORECASE)
_NO_KEYS = ("", "none", "empty", "dummy", _POLICY["policy_api_key"])
_LONG = 8
"""Characters from which a key is one also as a part of another text."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_VARIABLE = re.compile(r"\$\{oc\.env:[A-Za-z_]\w*(,[^}]*)?\}")


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
    if not real:
        return PlannedServers(served_instances(config), group_size=group_size)
    try:
        if gym is None:
            raise refuse_without_gym(real)
        asked = {**gym_servers(source, checked, RESPONSES_ENDPOINT, places), **_POLICY}
        servers = _read_by(gym, asked, roots, unresolved(config))
    except RealServersError as error:
        return PlannedServers({}, refusal=error.message, group_size=group_size)
    return PlannedServers(servers, gym.version, group_size=group_size)


def _read_by(
    gym: InstalledGym,
    asked: dict[str, Any],
    roots: Sequence[str | Path],
    written: Mapping[str, Any],
) -> dict[str, Any]:
    """The servers as Gym reads them, and as it shall read them again."""
    gym_config = GymConfig(
        servers=asked, gym_python=gym.python, gym_roots=tuple(str(root) for root in roots)
    )
    base_urls = [_POLICY["policy_base_url"]]
    with start_blocking_portal("asyncio") as portal:
        read = portal.call(
            partial(read_by_gym, gym_config, base_urls, _POLICY["policy_model_name"])
        )
    return restated(read.config, written)


def restated(read: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that Gym has read, so that Gym gets the same out of it when a run starts.

    Args:
        read: As Gym has resolved it; not changed.
        written: The same with its references, where keys are looked up.

    Raises:
        RealServersError: A key is written out in it; names the place, not the key.
    """
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
        if name not in instances and name in written and not _NOT_PLANNED.fullmatch(name)
    }
    again: dict[str, Any] = _Restating(written, frozenset(_keys(kept))).of(kept, written, ())
    return again


def _keys(value: Any, name: str = "") -> Iterator[str]:
    """The keys in a configuration: texts whose name says that they are, and that are some."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _keys(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item, name)
    elif isinstance(value, str) and _KEY.search(name) and value.lower() not in _NO_KEYS:
        yield value


class _Restating(NamedTuple):
    written: Mapping[str, Any]
    keys: frozenset[str]

    def of(self, value: Any, here: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {
                key: self.of(item, _child(here, key), (*path, str(key)))
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [
                self.of(item, _child(here, index), (*path, str(index)))
                for index, item in enumerate(value)
            ]
        if not isinstance(value, str):
            return value
        if any(key == value or (len(key) >= _LONG and key in value) for key in self.keys):
            return _key_reference(here, self.written, path)
        # A resolved text is meant as it stands.
        text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
        for name, placeholder in _POLICY.items():
            text = text.replace(placeholder, f"${{{name}}}")
        return text


def _child(node: Any, key: Any) -> Any:
    if isinstance(node, dict):
        return node.get(key)
    return node[key] if isinstance(node, list) and key < len(node) else None


def _key_reference(here: Any, written: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """The environment variable that a key comes from, through other keys."""
    seen: set[str] = set()
    while isinstance(here, str) and (found := _REFERENCE.fullmatch(here)) and found[1] not in seen:
        seen.add(found[1])
        here = written.get(found[1])
    if isinstance(here, str) and _VARIABLE.fullmatch(here):
        return here
    raise RealServersError(
        f"{'.'.join(path)} holds a key, and a plan holds none: write ${{oc.env:NAME}} in its place, "
        "and put the key into that environment variable",
        setting=".".join(path),
    )
