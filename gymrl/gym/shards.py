"""Shards: named slices of the Gym configuration, their workers, and who serves which row.

A shard has its own worker, or several *replicas* of it. Every worker is an *instance* and has a
label: the shard's name, or ``name/0``, ``name/1``, ... where there are replicas. A row's *route*
fixes its shard; replicas take turns, one whole prompt group at a time, because a verifier that
compares a prompt's rollouts waits for all of them in one process.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from gymrl.config import GymConfig, ShardConfig
from gymrl.errors import ConfigError, RowTypeError, RowValueError
from gymrl.gym.materialized import taskset_route

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gymrl.types import Row

HandleT = TypeVar("HandleT")

DEFAULT_SHARD = "default"
"""The name of the only shard of a job that names none."""

# Instances of these kinds may be named by a row; model servers may not.
_ROUTED_KINDS = ("responses_api_agents", "resources_servers")


def row_route(row: Mapping[str, Any], index: int) -> str:
    """Which instance a dataset row names: ``agent_ref.name``, else ``task_source``.

    A materialized task has its taskset's route: ``taskset:`` and its name.

    Raises:
        RowTypeError: ``agent_ref`` is no mapping, or one of the names is not a string.
        RowValueError: Neither is there, or the row is a materialized task and malformed.
    """
    try:
        taskset = taskset_route(row, index)
    except ConfigError as error:
        raise RowValueError(error.message, row=index) from error
    if taskset is not None:
        return taskset
    agent_ref = row.get("agent_ref")
    if agent_ref is not None and not isinstance(agent_ref, dict):
        raise RowTypeError(
            f"row {index}: agent_ref is a {type(agent_ref).__name__}; "
            'a mapping like {"name": "my_agent"} is needed',
            row=index,
        )
    agent_name = (agent_ref or {}).get("name")
    for field, value in (("agent_ref.name", agent_name), ("task_source", row.get("task_source"))):
        if value is not None and not isinstance(value, str):
            raise RowTypeError(
                f"row {index}: {field} is a {type(value).__name__}; a string is needed", row=index
            )
        if value:
            return value
    raise RowValueError(
        f"row {index} has no route: give it agent_ref.name or a non-empty task_source", row=index
    )


class PlannedShard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard to start.

    Attributes:
        name: The shard's name.
        config: The slice of the Gym configuration that each of its workers gets.
        labels: The instance label of each replica, in order.
    """

    name: str
    config: GymConfig
    labels: tuple[str, ...]


def instance_labels(shard: str, replicas: int) -> tuple[str, ...]:
    """``shard`` for one replica, else ``shard/0``, ``shard/1``, ..."""
    if replicas == 1:
        return (shard,)
    return tuple(f"{shard}/{number}" for number in range(replicas))


def plan_shards(
    config: GymConfig, shards: Mapping[str, ShardConfig], replicas: int = 1
) -> tuple[PlannedShard, ...]:
    """Cut a Gym configuration into its shards.

    Args:
        config: The whole configuration.
        shards: Slices by name; empty: one shard of everything.
        replicas: Of the one shard, where `shards` is empty.

    Raises:
        ConfigError: A shard names an unknown server, two shards host one route, a server is left
            out, a slice refers to a server outside it, or a shard's name has other characters than
            letters, digits and ``_.-``. Or `config` includes Gym's own files.
    """
    if not shards:
        labels = instance_labels(DEFAULT_SHARD, replicas)
        return (PlannedShard(name=DEFAULT_SHARD, config=config, labels=labels),)
    if config.registry_url is not None:
        raise ConfigError(
            "shards: servers that someone else runs (gym.registry_url) can't be cut into shards",
            setting="shards",
        )
    if "config_paths" in config.servers:
        raise ConfigError(
            "shards: which instances config_paths declares is known only once Gym has read them; "
            "write the instances out in gym.servers",
            setting="shards",
        )
    hosted_by: dict[str, str] = {}
    for name, shard in shards.items():
        _check_shard(name, shard, config, hosted_by)
    models = [name for name in config.servers if not _is_routed(config.servers[name])]
    left_out = sorted(set(config.servers) - set(models) - set(hosted_by))
    if left_out:
        raise ConfigError(
            f"shards: no shard lists {', '.join(left_out)}; add each to one shard", setting="shards"
        )
    return tuple(
        PlannedShard(
            name=name,
            config=_slice(name, config, {*shard.servers, *models}),
            labels=instance_labels(name, shard.replicas),
        )
        for name, shard in shards.items()
    )


def _check_shard(
    name: str, shard: ShardConfig, config: GymConfig, hosted_by: dict[str, str]
) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ConfigError(
            f"shards: {name!r} is no name for a shard; use letters, digits and _ . -",
            setting="shards",
        )
    for server in shard.servers:
        if server not in config.servers:
            known = ", ".join(sorted(config.servers)) or "none"
            raise ConfigError(
                f"shards.{name}: no server {server!r} in gym.servers (there: {known})",
                setting=f"shards.{name}.servers",
            )
        if not _is_routed(config.servers[server]):
            continue
        if server in hosted_by:
            raise ConfigError(
                f"shards: {server!r} is hosted by {hosted_by[server]!r} and by {name!r}; "
                "a route belongs to one shard (use replicas for more workers)",
                setting="shards",
            )
        hosted_by[server] = name


def _is_routed(server: Any) -> bool:
    return isinstance(server, dict) and any(kind in server for kind in _ROUTED_KINDS)


def _slice(name: str, config: GymConfig, servers: set[str]) -> GymConfig:
    kept = {server: block for server, block in config.servers.items() if server in servers}
    for server, block in kept.items():
        for reference in _references(block):
            if reference in config.servers and reference not in kept:
                raise ConfigError(
                    f"shards.{name}: {server!r} refers to {reference!r}, which lives in another "
                    "shard; list both in one shard",
                    setting=f"shards.{name}.servers",
                )
    return msgspec.structs.replace(config, servers=kept)


def _references(block: Any) -> Iterable[str]:
    """Names in ``{type: ..., name: ...}`` mappings anywhere in a server's block."""
    stack = [block]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(value.get("type"), str) and isinstance(value.get("name"), str):
                yield value["name"]
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)


class Shard(Generic[HandleT]):
    """A started shard: what it hosts, and the handle of each replica.

    Args:
        name: The shard's name.
        handles: One handle a replica, at least one.
        routes: What rows may name to get here; None hosts every route (an unsharded job).
    """

    def __init__(
        self, name: str, handles: Sequence[HandleT], routes: Iterable[str] | None = None
    ) -> None:
        if not handles:
            raise ConfigError(f"shard {name!r} has no worker", setting="shards")
        self.name = name
        self.routes = None if routes is None else frozenset(routes)
        self._instances = list(zip(instance_labels(name, len(handles)), handles, strict=True))
        self._turn = 0
        self._lock = threading.Lock()

    @property
    def instances(self) -> tuple[tuple[str, HandleT], ...]:
        """Label and handle of each replica."""
        return tuple(self._instances)

    def next_instance(self, avoid: str | None = None) -> tuple[str, HandleT]:
        """The replica whose turn it is; safe to call from several threads.

        Args:
            avoid: A label that is passed over where there is another replica.
        """
        with self._lock:
            label, handle = self._instances[self._turn % len(self._instances)]
            self._turn += 1
            if label == avoid and len(self._instances) > 1:
                label, handle = self._instances[self._turn % len(self._instances)]
                self._turn += 1
        return label, handle


class Bucket(NamedTuple, Generic[HandleT]):
    """What one instance gets: whole groups, in the order of the batch."""

    label: str
    handle: HandleT
    rows: list[Row]


class ShardSet(Generic[HandleT]):
    """All started shards; knows who serves a route.

    Raises:
        ConfigError: There is no shard, or two host one route (both are named).
    """

    def __init__(self, shards: Sequence[Shard[HandleT]]) -> None:
        if not shards:
            raise ConfigError("a job needs at least one shard", setting="shards")
        self._shards = tuple(shards)
        self._by_route: dict[str, Shard[HandleT]] = {}
        self._catch_all: Shard[HandleT] | None = None
        for shard in shards:
            if shard.routes is None:
                if len(shards) > 1:
                    raise ConfigError(
                        f"shard {shard.name!r} does not say what it hosts; "
                        "only the shard of an unsharded job may leave that out",
                        setting="shards",
                    )
                self._catch_all = shard
                continue
            for route in sorted(shard.routes):
                other = self._by_route.setdefault(route, shard)
                if other is not shard:
                    raise ConfigError(
                        f"route {route!r} is hosted by shard {other.name!r} and by shard "
                        f"{shard.name!r}; a route belongs to one shard",
                        setting="shards",
                    )

    @property
    def routes(self) -> tuple[str, ...]:
        """Every hosted route, sorted; empty where one shard takes all of them."""
        return tuple(sorted(self._by_route))

    @property
    def instances(self) -> tuple[tuple[str, HandleT], ...]:
        """Label and handle of every worker."""
        return tuple(instance for shard in self._shards for instance in shard.instances)

    def shard_of(self, route: str, row: int | None = None) -> Shard[HandleT]:
        """The shard that hosts `route`.

        Raises:
            RowValueError: No shard does; the hosted routes are listed, sorted.
        """
        shard = self._by_route.get(route, self._catch_all)
        if shard is None:
            where = "" if row is None else f"row {row}: "
            raise RowValueError(
                f"{where}no shard hosts {route!r} (hosted: {', '.join(self.routes) or 'nothing'})",
                row=row,
            )
        return shard


def bucket_rows(
    rows: Sequence[Row], shard_set: ShardSet[HandleT], routing_group_size: int
) -> list[Bucket[HandleT]]:
    """Split prepared rows into one bucket an instance, by whole group.

    Args:
        rows: In batch order; their batch-global indices stay as they are.
        shard_set: Who serves what. Its replicas take turns, also over several calls.
        routing_group_size: Contiguous rows that must stay on one instance.

    Returns:
        Buckets in first-use order; an instance without rows is left out.

    Raises:
        RowValueError: A group mixes routes, the size is not positive or does not divide the number
            of rows, or no shard hosts a route. Nothing was assigned then.
    """
    buckets: dict[str, Bucket[HandleT]] = {}
    for group, shard in route_groups(rows, shard_set, routing_group_size):
        label, handle = shard.next_instance()
        buckets.setdefault(label, Bucket(label, handle, [])).rows.extend(group)
    return list(buckets.values())


def route_groups(
    rows: Sequence[Row], shard_set: ShardSet[HandleT], routing_group_size: int
) -> list[tuple[Sequence[Row], Shard[HandleT]]]:
    """The groups of a batch, each with the shard that it goes to; nobody's turn is taken.

    Raises:
        RowValueError: As :func:`bucket_rows`.
    """
    if routing_group_size <= 0 or len(rows) % routing_group_size:
        raise RowValueError(
            f"{len(rows)} rows are not whole groups of {routing_group_size} (routing_group_size)"
        )
    groups = [
        rows[start : start + routing_group_size]
        for start in range(0, len(rows), routing_group_size)
    ]
    return [(group, shard_set.shard_of(_one_route(group), group[0].index)) for group in groups]


def _one_route(group: Sequence[Row]) -> str:
    route = group[0].route
    for row in group:
        if row.route != route:
            raise RowValueError(
                f"rows {group[0].index} to {group[-1].index} are one group but mix routes: "
                f"row {group[0].index} goes to {route!r}, row {row.index} to {row.route!r}",
                row=row.index,
            )
    return route
