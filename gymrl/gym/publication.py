"""What our registry tells clients, Gym's own among them: the configuration with every address in it."""

from __future__ import annotations

import copy
import os
import re
import time
from typing import TYPE_CHECKING, Any

from gymrl.errors import ConfigError
from gymrl.gym.registry import AGENTS, ENVIRONMENTS, MODELS, RELAY, read_instances

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLICY_MODEL = "policy_model"
REGISTRY = "head_server"

_SECRET = re.compile(r"api_?key|secret|password|authorization|_token$|^token$", re.IGNORECASE)


def published_config(
    servers: Mapping[str, Any],
    addresses: Mapping[str, str],
    base_urls: Sequence[str],
    model_name: str,
) -> dict[str, Any]:
    """The configuration of a run that is up.

    Gym 0.7's clients reach agents through environment servers only. An agent that has none gets a
    relay's block with the agent's own address: the two have the same contract.

    Args:
        servers: The configured instances; not changed.
        addresses: Where they are, and under ``head_server`` the registry.
        base_urls: The policy's servers.
        model_name: The policy's name.
    """
    config: dict[str, Any] = copy.deepcopy(dict(servers))
    if base_urls and POLICY_MODEL not in config:
        block = {"entrypoint": "external", "base_url": base_urls[0], "model": model_name}
        config[POLICY_MODEL] = {MODELS: {"external": block}}
    known = dict(addresses)
    if base_urls:
        known.setdefault(POLICY_MODEL, base_urls[0])
    instances = read_instances(config)
    fronted = {i.reference("agent_server") for i in instances.values() if i.kind == ENVIRONMENTS}
    for instance in instances.values():
        if instance.name not in known:
            continue
        address = _address(known[instance.name])
        config[instance.name][instance.kind][instance.impl] |= address
        if instance.kind == AGENTS and instance.name not in fronted:
            agent = {"type": AGENTS, "name": instance.name}
            relay = {"entrypoint": "external", "agent_server": agent, **address}
            config[f"{instance.name}_environment_server"] = {ENVIRONMENTS: {RELAY: relay}}
    if base_urls:
        config["policy_base_url"] = list(base_urls)
    return config | {
        "policy_model_name": model_name,
        REGISTRY: _address(addresses[REGISTRY]),
    }


def instance_rows(
    config: Mapping[str, Any], processes: Mapping[str, tuple[int | None, str]] | None = None
) -> list[dict[str, Any]]:
    """``/server_instances``: a row for each instance with an address, relays left out.

    Args:
        config: As published.
        processes: Id and directory of the instances that are processes of their own.
    """
    own = processes or {}
    return [
        {
            "config_path": instance.name,
            "dir_path": own.get(instance.name, (None, ""))[1],
            "entrypoint": instance.block.get("entrypoint"),
            "host": instance.block["host"],
            "name": instance.impl,
            "pid": own.get(instance.name, (os.getpid(), ""))[0],
            "port": instance.block["port"],
            "process_name": instance.name,
            "server_type": instance.kind,
            "start_time": time.time(),
            "status": None,
            "uptime_seconds": None,
            "url": f"http://{instance.block['host']}:{instance.block['port']}",
        }
        for instance in read_instances(config).values()
        if "port" in instance.block and instance.impl != RELAY
    ]


def _address(url: str) -> dict[str, Any]:
    host, port = split_address(url)
    return {"host": host, "port": port}


def without_secrets(value: Any) -> Any:
    """A copy of a configuration in which keys, tokens and passwords are left out."""
    if isinstance(value, dict):
        return {
            key: without_secrets(item)
            for key, item in value.items()
            if not _SECRET.search(str(key))
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def split_address(url: str) -> tuple[str, int]:
    """Host and port of a URL.

    Raises:
        ConfigError: It is no http or https URL.
    """
    found = re.match(r"(https?)://(?:\[([^\]]+)\]|([^:/]+))(?::(\d+))?", url)
    if found is None:
        raise ConfigError(f"{url!r} is no URL of a server", setting="base_urls")
    scheme, ipv6, name, port = found.groups()
    return ipv6 or name, int(port) if port else (443 if scheme == "https" else 80)
