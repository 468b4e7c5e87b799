"""One server instance: one of ours in this event loop, or one that somebody else runs.

Real Gym servers, which run as processes in an interpreter of their own, are in
:mod:`gymrl.gym.real_servers`.
"""

from __future__ import annotations

import importlib
import re
from typing import Protocol

import anyio.to_thread

from gymrl.errors import ConfigError
from gymrl.extras import install_hint
from gymrl.gym.embedded.base import EmbeddedServer, Peers
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.registry import InstanceConfig, RouteTable

_ENTRYPOINT = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


class ServedInstance(Protocol):
    """A server instance that has an address."""

    config: InstanceConfig

    @property
    def url(self) -> str:
        """Its address."""
        ...

    async def start(self) -> None:
        """Make it listen; :attr:`url` is known after. Does not wait until it answers."""
        ...

    def check(self) -> None:
        """Raise `ServerDiedError` where it is known to be gone without asking it."""
        ...

    async def stop(self) -> None:
        """Stop it; nothing of it remains. Safe to call twice."""
        ...


class EmbeddedInstance:
    """A server of ours in this event loop."""

    def __init__(self, config: InstanceConfig, server: EmbeddedServer, ports: PortRange) -> None:
        self.config = config
        self._server = server
        self._listener = Listener(server.application(), ports)
        self._opened = False

    @property
    def url(self) -> str:
        """Its address."""
        return self._listener.url

    async def start(self) -> None:
        """Open the server and listen."""
        await self._server.open()
        self._opened = True
        await self._listener.start()

    def check(self) -> None:
        """It lives as long as this event loop."""

    async def stop(self) -> None:
        """Cancel its requests, stop listening, close the server."""
        await self._listener.stop()
        if self._opened:
            self._opened = False
            await self._server.close()


class RemoteInstance:
    """A server that somebody else runs."""

    def __init__(self, config: InstanceConfig) -> None:
        self.config = config
        self.url = RouteTable({config.name: {config.kind: {config.impl: config.block}}}).url_of(
            config.name
        )

    async def start(self) -> None:
        """Nothing to start."""

    def check(self) -> None:
        """Nothing is known of it."""

    async def stop(self) -> None:
        """Nothing to stop."""


async def make_instance(config: InstanceConfig, peers: Peers, ports: PortRange) -> ServedInstance:
    """The instance that a configuration block asks for; nothing is started.

    Args:
        config: The block.
        peers: Where the other instances will be.
        ports: Where servers of ours listen, unless the block names host or port.

    Raises:
        ConfigError: The block asks for something that cannot be; names the instance.
    """
    entrypoint = config.block.get("entrypoint")
    match = _ENTRYPOINT.fullmatch(entrypoint) if isinstance(entrypoint, str) else None
    if match is None:
        if config.block.get("port") is not None:
            return RemoteInstance(config)
        raise ConfigError(
            f"instance {config.name!r}: entrypoint {entrypoint!r} is not one of ours "
            "(package.module:Class), and it names no host and port of a server that runs; "
            "set gym_python to start real Gym servers (app.py), or start it elsewhere and give its "
            "address, or its registry as registry_url",
            setting=config.name,
        )
    # Importing an environment may take seconds and must not hold the loop.
    server_class = await anyio.to_thread.run_sync(
        _load, config.name, match.group(1), match.group(2), abandon_on_cancel=True
    )
    if server_class.kind != config.kind:
        raise ConfigError(
            f"instance {config.name!r} stands under {config.kind}, but {entrypoint} belongs "
            f"under {server_class.kind}",
            setting=config.name,
        )
    server = server_class(config.name, config.block, peers)
    own_ports = ports.fixed(config.block.get("host"), config.block.get("port"))
    return EmbeddedInstance(config, server, own_ports)


def _import_hint(module: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return (
            "; start where it lies (the command line looks in the working directory), or name its "
            "directory in PYTHONPATH"
        )
    return install_hint(error)


def _load(instance: str, module: str, name: str) -> type[EmbeddedServer]:
    try:
        loaded = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"instance {instance!r}: entrypoint {module}:{name} cannot be imported: "
            f"{type(error).__name__}: {error}{_import_hint(module, error)}",
            setting=instance,
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, EmbeddedServer)):
        raise ConfigError(
            f"instance {instance!r}: entrypoint {module}:{name} is no embedded server class",
            setting=instance,
        )
    return loaded
