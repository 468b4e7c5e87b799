"""The servers of several benchmarks as one set. Pure.

Benchmarks may call different servers by one name: all flavors of a family do. The first keeps the
name; the others' instances get another for the run, in their own references and in their rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import ConfigError
from gymrl.gym.registry import TASKSET_ROUTES, read_instances

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gymrl.evaluation.plan import BenchmarkPlan, EvaluationPlan


class MergedServers(msgspec.Struct, frozen=True):
    """What a run starts.

    Attributes:
        servers: All instances, in Gym's shape.
        renamed: For each benchmark's label, its instances that bear another name here.
    """

    servers: dict[str, Any]
    renamed: dict[str, dict[str, str]]


def merged_servers(plan: EvaluationPlan) -> MergedServers:
    """The servers of all benchmarks of a plan.

    A benchmark keeps its names where they are free, or stand for the same servers; else all of its
    instances are renamed together, so that they go on referring to each other.

    Raises:
        ConfigError: A benchmark's servers cannot be started here; says what to do.
    """
    merged: dict[str, Any] = {}
    renamed: dict[str, dict[str, str]] = {}
    for benchmark in plan.benchmarks:
        if benchmark.refusal is not None:
            raise ConfigError(
                f"benchmark {benchmark.label!r}: {benchmark.refusal}. For an evaluation, make the "
                "plan anew, where that is cured, or name the registry (registry_url)",
                setting="registry_url",
            )
        servers = {name: benchmark.servers[name] for name in read_instances(benchmark.servers)}
        clash = any(name in merged and merged[name] != block for name, block in servers.items())
        names = _free_names(servers, merged) if clash else {}
        renamed[benchmark.label] = names
        for name, block in servers.items():
            merged[names.get(name, name)] = _with_references(block, names)
        _merge_settings(merged, benchmark, names)
    return MergedServers(merged, renamed)


def _merge_settings(
    merged: dict[str, Any], benchmark: BenchmarkPlan, names: Mapping[str, str]
) -> None:
    """Add what a configuration of NeMo Gym's has beside instances; it is there once for all."""
    instances = read_instances(benchmark.servers)
    for name, value in benchmark.servers.items():
        if name in instances:
            continue
        if name == TASKSET_ROUTES and isinstance(value, dict):
            routes = {taskset: names.get(server, server) for taskset, server in value.items()}
            known = merged.setdefault(name, {})
            differs = any(
                known.get(taskset, server) != server for taskset, server in routes.items()
            )
            known |= routes
        else:
            differs = merged.setdefault(name, value) != value
        if differs:
            raise ConfigError(
                f"benchmark {benchmark.label!r} sets {name} otherwise than another benchmark of the "
                "plan, and NeMo Gym's servers share it: run them as evaluations of their own",
                setting=name,
            )


def _free_names(servers: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, str]:
    number = 2
    while any(f"{name}_{number}" in taken or f"{name}_{number}" in servers for name in servers):
        number += 1
    return {name: f"{name}_{number}" for name in servers}


def _with_references(value: Any, names: Mapping[str, str]) -> Any:
    """A copy in which ``{type: ..., name: ...}`` refer to the new names."""
    if isinstance(value, dict):
        copy = {key: _with_references(item, names) for key, item in value.items()}
        if isinstance(copy.get("type"), str) and isinstance(copy.get("name"), str):
            copy["name"] = names.get(copy["name"], copy["name"])
        return copy
    if isinstance(value, list):
        return [_with_references(item, names) for item in value]
    return value


def rerouted(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A copy of a row that goes to the renamed instances."""
    copy = dict(row)
    source = copy.get("task_source")
    if isinstance(source, str):
        copy["task_source"] = names.get(source, source)
    agent = copy.get("agent_ref")
    if isinstance(agent, dict) and isinstance(agent.get("name"), str):
        copy["agent_ref"] = {**agent, "name": names.get(agent["name"], agent["name"])}
    return copy
