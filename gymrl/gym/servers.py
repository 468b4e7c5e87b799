"""Start, watch and stop the servers of one worker.

An instance of the configuration is an embedded server (``entrypoint: package.module:Class``), which
runs here; or a server that somebody else runs at the ``host`` and ``port`` it names; or a model, of
which only the address matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from gymrl.concurrency import close_within, gather_bounded
from gymrl.errors import ConfigError, ServerStartError
from gymrl.gym.embedded.base import Peers
from gymrl.gym.health import check_alive, wait_until_up
from gymrl.gym.instances import ServedInstance, make_instance
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.publication import (
    POLICY_MODEL,
    instance_rows,
    published_config,
    split_address,
    without_secrets,
)
from gymrl.gym.registry import (
    AGENTS,
    MODELS,
    InstanceConfig,
    RegistryServer,
    RouteTable,
    read_instances,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.config import GymConfig
    from gymrl.gym.client import HttpPool

STOP_TIMEOUT_S = 5.0
REGISTRY = "registry"
"""What errors call the registry server."""


class ServerSet:
    """All servers of one worker.

    Args:
        config: The worker's configuration.
        registry_port: Of the registry server; None: as the other servers.
    """

    def __init__(self, config: GymConfig, registry_port: int | None = None) -> None:
        self._config = config
        self._ports = PortRange(config.host, config.port_range_low, config.port_range_high)
        self._instances: list[ServedInstance] = []
        self._registry = RegistryServer()
        self._registry_listener = Listener(
            self._registry.application(), self._ports.fixed(None, registry_port)
        )
        self.table = RouteTable({})

    @property
    def registry_url(self) -> str:
        """Address of the registry server."""
        return self._registry_listener.url

    async def start(self, pool: HttpPool, base_urls: Sequence[str], model_name: str) -> None:
        """Start every instance and wait until each answers.

        On failure or cancellation everything that was started is stopped.

        Args:
            pool: For probing.
            base_urls: The policy's OpenAI-compatible servers, with ``/v1``.
            model_name: What agents put into ``model``.

        Raises:
            ConfigError: An instance cannot be made from its block.
            ServerStartError: Names the instance that failed or was not ready in time.
        """
        try:
            await self._start(pool, [url.rstrip("/") for url in base_urls], model_name)
        except BaseException:
            await close_within(self.stop(), STOP_TIMEOUT_S, "servers after a failed start")
            raise

    async def _start(self, pool: HttpPool, base_urls: list[str], model_name: str) -> None:
        seconds = self._config.spinup_timeout_s
        waiting: set[str] = set()
        with anyio.move_on_after(seconds) as scope:
            await self._start_registry()
            for url in base_urls:
                split_address(url)
            peers = Peers(model_name, names_rollouts=self._config.token_source != "messages")
            instances = read_instances(self._config.servers)
            _introduce_models(peers, instances, base_urls)
            waiting |= instances.keys()
            for config in instances.values():
                if config.kind != MODELS:
                    self._instances.append(await make_instance(config, peers, self._ports))
            for instance in self._instances:
                await self._start_one(instance)
                peers.set(instance.config.name, instance.url)
            _check_references(instances, peers)
            probes = {i.config.name: f"{i.url}/livez" for i in self._instances}
            probes |= {f"{POLICY_MODEL} ({url})": f"{url}/models" for url in base_urls}
            waiting.clear()
            waiting |= probes.keys()
            await gather_bounded(
                lambda item: wait_until_up(pool, *item, waiting), sorted(probes.items())
            )
        if scope.cancelled_caught:
            raise ServerStartError(
                f"not ready within {seconds:g} s (set by gym.spinup_timeout_s): "
                f"{', '.join(sorted(waiting))}",
                instance=sorted(waiting)[0] if waiting else None,
            )
        addresses = {i.config.name: i.url for i in self._instances}
        addresses["head_server"] = self.registry_url
        published = published_config(self._config.servers, addresses, base_urls, model_name)
        self.table = RouteTable(published)
        self._registry.publish(without_secrets(published), instance_rows(published))

    async def _start_registry(self) -> None:
        try:
            await self._registry_listener.start()
        except (ServerStartError, OSError) as error:
            raise ServerStartError(
                f"the registry server could not start: {error}", instance=REGISTRY
            ) from error

    async def _start_one(self, instance: ServedInstance) -> None:
        name = instance.config.name
        try:
            await instance.start()
        except Exception as error:
            raise ServerStartError(
                f"server {name!r} could not start: {type(error).__name__}: {error}", instance=name
            ) from error

    async def check(self, pool: HttpPool) -> None:
        """Ask every server whether it lives.

        Raises:
            ServerDiedError: One does not answer; names it.
        """
        addresses = {i.config.name: i.url for i in self._instances}
        await check_alive(pool, {"registry": self.registry_url, **addresses})

    async def stop(self) -> None:
        """Stop everything. Safe to call twice."""
        instances, self._instances = self._instances, []

        async def stop(instance: ServedInstance) -> None:
            await close_within(instance.stop(), STOP_TIMEOUT_S, f"server {instance.config.name}")

        await gather_bounded(stop, instances)
        await self._registry_listener.stop()


def _introduce_models(
    peers: Peers, instances: dict[str, InstanceConfig], base_urls: list[str]
) -> None:
    roots = [url.removesuffix("/v1") for url in base_urls]
    if roots:
        peers.set(POLICY_MODEL, *roots)
    for config in instances.values():
        if config.kind != MODELS or (config.name == POLICY_MODEL and roots):
            continue
        base_url = config.block.get("base_url")
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"model {config.name!r} needs a base_url that is a URL, not {base_url!r}",
                setting=config.name,
            )
        peers.set(config.name, base_url.rstrip("/").removesuffix("/v1"))


def _check_references(instances: dict[str, InstanceConfig], peers: Peers) -> None:
    for config in instances.values():
        if config.kind != AGENTS:
            continue
        for key in ("resources_server", "model_server"):
            target = config.reference(key)
            if target is None:
                continue
            try:
                peers.url(target)
            except ConfigError as error:
                hint = "; give base_urls" if target == POLICY_MODEL else ""
                raise ConfigError(
                    f"instance {config.name!r}: {key}: {error}{hint}", setting=config.name
                ) from error
