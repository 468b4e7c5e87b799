"""The worker behind a served benchmark: its servers, the policy server, the registry."""

from __future__ import annotations

import logging
import math
from contextlib import AsyncExitStack
from functools import partial
from http import HTTPStatus

import anyio

from gymrl.actors import Actor
from gymrl.benchmark.policy import PolicyServer
from gymrl.benchmark.tasks import BaseServerConfig
from gymrl.concurrency import close_within, gather_bounded
from gymrl.config import Config, GymConfig
from gymrl.errors import ConfigError, GymRequestError, GymTransportError, ServerStartError
from gymrl.gym.client import HttpPool
from gymrl.gym.health import PROBE_INTERVAL_S
from gymrl.gym.listener import PortRange
from gymrl.gym.policy_key import REFUSED, KeyedPool
from gymrl.gym.publication import split_address
from gymrl.gym.servers import REGISTRY, ServerSet

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 30.0


class ServingConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a benchmark's worker is told.

    Attributes:
        gym: The servers, and where they listen.
        base_urls: The policy's endpoints, with ``/v1``.
        api_key: Sent to the endpoints as a bearer token.
        registry_port: Of the registry server; None: any.
        has_model_server: The policy has a model server among `gym.servers`; else a relay of ours
            stands for it.
        readiness_timeout_s: Deadline for the endpoints to answer; infinity: none.
    """

    gym: GymConfig
    base_urls: tuple[str, ...]
    api_key: str | None = None
    registry_port: int | None = None
    readiness_timeout_s: float = 600.0
    has_model_server: bool = False


class BenchmarkServers(Actor):
    """All servers of one benchmark, in one process."""

    async def setup(self, config: ServingConfig) -> None:
        """Start nothing yet."""
        self._config = config
        self._stack = AsyncExitStack()

    async def start(self) -> BaseServerConfig:
        """Start every server and wait until all are ready.

        Raises:
            ConfigError: A server cannot be made or was not ready in time, the registry's port is
                in use, or the model endpoint does not answer or refuses the key.
        """
        try:
            return await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> BaseServerConfig:
        config = self._config
        policy_pool = await self._stack.enter_async_context(KeyedPool(config.api_key or None))
        pool = await self._stack.enter_async_context(HttpPool())
        policy_urls = []
        if not config.has_model_server:
            policy = PolicyServer(config.base_urls, policy_pool, PortRange(config.gym.host))
            self._stack.push_async_callback(policy.stop)
            await policy.start()
            policy_urls = [policy.base_url]
        servers = ServerSet(config.gym, config.registry_port)
        # Both take their time, and what is wrong with one is told at once.
        waits = [
            partial(self._wait_for_endpoints, policy_pool),
            partial(self._start_servers, servers, pool, policy_urls),
        ]
        await gather_bounded(lambda wait: wait(), waits)
        return BaseServerConfig(*split_address(servers.registry_url))

    async def _start_servers(
        self, servers: ServerSet, pool: HttpPool, policy_urls: list[str]
    ) -> None:
        config = self._config
        try:
            await servers.start(pool, policy_urls, config.gym.model_name)
        except ServerStartError as error:
            if error.instance == REGISTRY and config.registry_port is not None:
                raise ConfigError(
                    f"registry_port={config.registry_port}: the port is in use on "
                    f"{config.gym.host}; choose another, or leave it out",
                    setting="registry_port",
                ) from error
            raise ConfigError(
                f"a server was not ready: {error.message}", setting=error.instance
            ) from error
        self._stack.push_async_callback(servers.stop)

    async def _wait_for_endpoints(self, pool: HttpPool) -> None:
        seconds = self._config.readiness_timeout_s
        heard = dict.fromkeys(self._config.base_urls, "nothing")
        with anyio.move_on_after(seconds if seconds < math.inf else None) as scope:
            await gather_bounded(lambda url: _wait_for_models(pool, url, heard), list(heard))
        if scope.cancelled_caught:
            said = "; ".join(f"{url}: {answer}" for url, answer in heard.items() if answer)
            raise ConfigError(
                f"the model endpoint was not ready within {seconds:g} s (set by "
                f"model_endpoint_readiness_timeout_seconds); GET <base>/models gave: {said}",
                setting="policy_base_url",
            )

    async def close(self) -> None:
        """Stop everything. Safe to call twice."""
        stack, self._stack = self._stack, AsyncExitStack()
        await close_within(stack.aclose(), _STOP_TIMEOUT_S, "a benchmark's servers")


async def _wait_for_models(pool: HttpPool, base_url: str, heard: dict[str, str]) -> None:
    """Ask an endpoint for its models until it answers with a status that is not 5xx.

    An endpoint that does not list its models (404) is ready all the same.
    """
    url = f"{base_url.rstrip('/')}/models"
    while True:
        with anyio.move_on_after(_PROBE_TIMEOUT_S) as probe:
            try:
                answer = await pool.get(url)
            except (GymTransportError, GymRequestError) as error:
                heard[base_url] = error.message
            else:
                heard[base_url] = f"HTTP {answer.status}: {answer.excerpt[:200]}"
                if answer.status in REFUSED:
                    raise ConfigError(
                        f"the model endpoint refuses the key: {heard[base_url]} from {url}",
                        setting="policy_api_key",
                    )
                if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    heard[base_url] = ""
                    return
        if probe.cancelled_caught:
            heard[base_url] = f"no answer within {_PROBE_TIMEOUT_S:g} s"
        await anyio.sleep(PROBE_INTERVAL_S)
