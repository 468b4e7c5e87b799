"""Start, watch and stop the servers of one worker.

An instance of the configuration is an embedded server (``entrypoint: package.module:Class``), which
runs here; or a real Gym server (``entrypoint: app.py``, and `gym_python` is set), which runs as a
process in the interpreter that has NeMo Gym; or a server that somebody else runs at the ``host`` and ``port`` it names; or a model, of
which only the address matters.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import yaml

from gymrl.concurrency import OwnedTasks, close_within, gather_bounded
from gymrl.errors import ConfigError, ServerStartError
from gymrl.gym.deaths import DeathWatch
from gymrl.gym.embedded.base import Peers
from gymrl.gym.health import check_alive, wait_until_up
from gymrl.gym.instances import ServedInstance, make_instance
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.policy_key import wait_for_policy
from gymrl.gym.policy_relay import PolicyRelay
from gymrl.gym.publication import (
    POLICY_MODEL,
    instance_rows,
    published_config,
    split_address,
    without_secrets,
)
from gymrl.gym.real_processes import make_process_instances
from gymrl.gym.real_servers import asks_for_gym, is_relay, read_by_gym
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
    from gymrl.errors import ServerDiedError
    from gymrl.gym.client import HttpPool
    from gymrl.gym.real_processes import ProcessInstance

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
TELL_EVERY_S = 10.0
REGISTRY = "registry"
"""What errors call the registry server."""


class ServerSet:
    """All servers of one worker.

    Args:
        config: The worker's configuration.
        registry_port: Of the registry server; None: as the other servers.
        tell_every_s: How often the log says what a start still waits for. Whoever waits for this
            worker may have a deadline of its own, and then it is all that is heard.
    """

    def __init__(
        self,
        config: GymConfig,
        registry_port: int | None = None,
        *,
        tell_every_s: float = TELL_EVERY_S,
    ) -> None:
        self._config = config
        self._tell_every_s = tell_every_s
        self._ports = PortRange(config.host, config.port_range_low, config.port_range_high)
        self._instances: list[ServedInstance] = []
        self._registry = RegistryServer()
        self._registry_listener = Listener(
            self._registry.application(), self._ports.fixed(None, registry_port)
        )
        self._policy_relay: Listener | None = None
        self.table = RouteTable({})
        self.deaths = DeathWatch()

    @property
    def registry_url(self) -> str:
        """Address of the registry server."""
        return self._registry_listener.url

    async def start(
        self,
        pool: HttpPool,
        base_urls: Sequence[str],
        model_name: str,
        policy_pool: HttpPool | None = None,
    ) -> None:
        """Start every instance and wait until each answers.

        On failure or cancellation everything that was started is stopped.

        Args:
            pool: For probing.
            base_urls: The policy's OpenAI-compatible servers, with ``/v1``.
            model_name: What agents put into ``model``.
            policy_pool: Sends the key that the policy's servers ask for; None: `pool`, no key.

        Raises:
            ConfigError: An instance cannot be made from its block, or a policy server refuses the
                key.
            ServerStartError: Names the instance that failed or was not ready in time.
        """
        try:
            urls = [url.rstrip("/") for url in base_urls]
            await self._start(pool, policy_pool or pool, urls, model_name)
        except BaseException:
            await close_within(self.stop(), STOP_TIMEOUT_S, "servers after a failed start")
            raise

    async def _start(
        self, pool: HttpPool, policy_pool: HttpPool, endpoints: list[str], model_name: str
    ) -> None:
        seconds = self._config.spinup_timeout_s
        waiting: set[str] = set()
        with anyio.move_on_after(seconds) as scope:
            await self._start_registry()
            for url in endpoints:
                split_address(url)
            base_urls = endpoints
            if endpoints and self._config.api_key_env is not None:
                # Nothing but the relay knows where the policy is, and what it asks for.
                relay = await self._start_policy_relay(policy_pool, endpoints, model_name)
                base_urls = [f"{relay.url}/v1"]
            config, processes = await self._read_config(base_urls, model_name, waiting)
            if processes and base_urls and self._policy_relay is None:
                await self._start_policy_relay(pool, base_urls, model_name)
            peers = Peers(
                model_name,
                names_rollouts=self._config.token_source != "messages",
                key_variable=self._config.api_key_env,
            )
            for process in processes:
                peers.set(process.config.name, process.url)
            await self._start_others(config, peers, base_urls, waiting)
            published = published_config(config, self._addresses(config), base_urls, model_name)
            config_yaml = yaml.safe_dump(published, sort_keys=False, allow_unicode=True)
            for process in processes:
                process.configure(config_yaml)
                await self._start_one(process)
            await self._wait_until_up(pool, policy_pool, endpoints, waiting)
            self.table = RouteTable(published)
            rows = instance_rows(
                published, {p.config.name: (p.pid, p.directory) for p in processes}
            )
            self._registry.publish(without_secrets(published), rows)
        if scope.cancelled_caught:
            raise ServerStartError(
                f"not ready within {seconds:g} s (set by gym.spinup_timeout_s): "
                f"{', '.join(sorted(waiting))}",
                instance=sorted(waiting)[0] if waiting else None,
            )

    async def _read_config(
        self, base_urls: list[str], model_name: str, waiting: set[str]
    ) -> tuple[dict[str, Any], list[ProcessInstance]]:
        """The instances, read by Gym where it has to; the real ones have ports but do not run."""
        if not asks_for_gym(self._config):
            return self._config.servers, []
        waiting.add("NeMo Gym, reading the configuration")
        real = await read_by_gym(self._config, base_urls, model_name)
        waiting.clear()
        processes = make_process_instances(self._config, real, self._report)
        self._instances += processes
        return real.config, processes

    def _report(self, death: ServerDiedError) -> None:
        self.deaths.report(death)
        self._registry.report(death)

    async def _start_policy_relay(
        self, pool: HttpPool, base_urls: list[str], model_name: str
    ) -> Listener:
        relay = PolicyRelay(pool, [url.removesuffix("/v1") for url in base_urls], model_name)
        self._policy_relay = Listener(relay.application(), self._ports)
        await self._policy_relay.start()
        return self._policy_relay

    async def _start_others(
        self, config: dict[str, Any], peers: Peers, base_urls: list[str], waiting: set[str]
    ) -> None:
        """Start what is no process, and tell `peers` where it is."""
        processes = {instance.config.name for instance in self._instances}
        others = {n: i for n, i in read_instances(config).items() if n not in processes}
        _introduce_models(peers, others, base_urls)
        waiting |= others.keys()
        made = [
            await make_instance(instance, peers, self._ports)
            for instance in others.values()
            if instance.kind != MODELS and not self._is_stood_in_for(instance)
        ]
        self._instances += made
        for instance in made:
            await self._start_one(instance)
            peers.set(instance.config.name, instance.url)
        _check_references(others, peers)
        waiting.clear()

    def _is_stood_in_for(self, instance: InstanceConfig) -> bool:
        """Whether an instance is a relay that nobody runs: its agent answers in its place."""
        return is_relay(instance) and (
            self._config.gym_python is not None or instance.block.get("port") is None
        )

    def _addresses(self, config: dict[str, Any]) -> dict[str, str]:
        addresses = {i.config.name: i.url for i in self._instances}
        for instance in read_instances(config).values():
            agent = instance.reference("agent_server")
            if self._is_stood_in_for(instance) and agent in addresses:
                addresses[instance.name] = addresses[agent]
        if self._policy_relay is not None:
            addresses[POLICY_MODEL] = self._policy_relay.url
        return addresses | {"head_server": self.registry_url}

    async def _wait_until_up(
        self, pool: HttpPool, policy_pool: HttpPool, endpoints: list[str], waiting: set[str]
    ) -> None:
        waiting |= {instance.config.name for instance in self._instances}
        waiting |= {f"{POLICY_MODEL} ({url})" for url in endpoints}
        variable = self._config.api_key_env

        async def server(instance: ServedInstance) -> None:
            name, url = instance.config.name, f"{instance.url}/livez"
            await wait_until_up(pool, name, url, waiting, instance.check)

        async def policy(url: str) -> None:
            name = f"{POLICY_MODEL} ({url})"
            await wait_for_policy(policy_pool, name, url, waiting, variable)

        waits = [partial(server, instance) for instance in self._instances]
        waits += [partial(policy, url) for url in endpoints]
        telling = OwnedTasks("spin-up")
        _ = telling.start(self._tell(waiting), "what is waited for")
        try:
            await gather_bounded(lambda wait: wait(), waits)
        finally:
            with anyio.CancelScope(shield=True):
                await telling.close()

    async def _tell(self, waiting: set[str]) -> None:
        while True:
            await anyio.sleep(self._tell_every_s)
            logger.warning("still waiting for an answer of %s", ", ".join(sorted(waiting)))

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
            ServerDiedError: One does not answer; names it. A process of ours that ended is named
                with its exit code and its last lines.
        """
        for instance in self._instances:
            instance.check()
        addresses = {i.config.name: i.url for i in self._instances}
        await check_alive(pool, {"registry": self.registry_url, **addresses})

    async def stop(self) -> None:
        """Stop everything. Safe to call twice."""
        instances, self._instances = self._instances, []

        async def stop(instance: ServedInstance) -> None:
            await close_within(instance.stop(), STOP_TIMEOUT_S, f"server {instance.config.name}")

        await gather_bounded(stop, instances)
        if self._policy_relay is not None:
            await self._policy_relay.stop()
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
        base_url, host, port = (config.block.get(key) for key in ("base_url", "host", "port"))
        if base_url is None and host and port:
            base_url = f"http://{host}:{port}"  # a model server of Gym's that somebody else runs
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"model {config.name!r} needs a base_url that is a URL, not {base_url!r}, or the host "
                "and port of a server that runs",
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
