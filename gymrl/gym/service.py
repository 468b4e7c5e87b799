"""The Gym worker: spin servers up, roll rows out, say how servers fare, shut down.

One actor is one worker process. It holds what is large (the tokenizer) and what is shared (the
connections, the servers); a call brings rows and nothing else.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import AsyncIterator

import anyio.to_thread
import msgspec

from gymrl.actors import Actor
from gymrl.api_keys import read_api_key
from gymrl.concurrency import close_within
from gymrl.config import GymConfig  # noqa: TC001 - actors read annotations at run time
from gymrl.errors import ServerError
from gymrl.gym.client import GymClient, HttpPool
from gymrl.gym.episode import DecodeFunction, EpisodeOptions
from gymrl.gym.health import check_alive, wait_for_registry
from gymrl.gym.ledger import open_ledgers
from gymrl.gym.policy_key import KeyedPool
from gymrl.gym.registry import RouteTable, read_registry
from gymrl.gym.rollouts import RowServer, stream_rows
from gymrl.gym.row_images import ImageReader
from gymrl.gym.servers import ServerSet
from gymrl.gym.text import load_decoder
from gymrl.media import MediaExchange
from gymrl.types import Row, RowResult  # noqa: TC001 - actors read annotations at run time

logger = logging.getLogger(__name__)

OPEN_FILES = 65536
SHUTDOWN_TIMEOUT_S = 20.0


class GymEndpoint(msgspec.Struct, frozen=True):
    """What a spun-up worker offers.

    Attributes:
        registry_url: Address of the registry server.
        routes: Every name a row may route to: agents and task sources, sorted.
    """

    registry_url: str
    routes: tuple[str, ...]


class GymService(Actor):
    """Rollouts through Gym agents. Calls may overlap; rows of all calls share the connections."""

    async def setup(self, config: GymConfig) -> None:
        """Load the tokenizer, once, when text is asked for, and the processor, where it is named.

        Starts no server.

        Raises:
            ConfigError: The tokenizer or the processor cannot be loaded, or the variable of
                `api_key_env` holds no key.
            UnsupportedOptionError: The processor can't be used for images.
        """
        self._config = config
        self._key = read_api_key(config.api_key_env, "gym.api_key_env")
        self._decode = await _decoder(config)
        self._images = await _image_reader(config)
        self._pool: HttpPool | None = None
        self._policy_pool: HttpPool | None = None
        self._servers: ServerSet | None = None
        self._table = RouteTable({})
        self._rows: RowServer | None = None

    async def spin_up(self, base_urls: list[str], model_name: str) -> GymEndpoint:
        """Start the configured servers, or find those of `registry_url`, and wait for them.

        Args:
            base_urls: The policy's OpenAI-compatible servers, with ``/v1``; agents take turns.
                Servers that somebody else runs know their policy already.
            model_name: What agents put into ``model``.

        Raises:
            ConfigError: A server's settings are wrong, or a policy server refuses the key, or
                wants one.
            ServerStartError: Names the server that was not ready in time.
            ServerError: The worker is spun up already, the registry's answer is malformed, or a
                policy server keeps no ledgers though `token_source` needs them.
        """
        if self._pool is not None:
            raise ServerError("this worker is spun up already; shut it down first")
        _allow_open_files()
        # A row's answer must be its own, whatever an agent sends besides.
        self._pool = HttpPool(reuses_connections=False)
        self._policy_pool = KeyedPool(self._key)
        try:
            await self._pool.__aenter__()
            await self._policy_pool.__aenter__()
            endpoint = await self._spin_up(self._pool, base_urls, model_name)
            ledgers = await open_ledgers(self._policy_pool, self._config, base_urls)
        except BaseException:
            await close_within(self.shutdown(), SHUTDOWN_TIMEOUT_S, "a worker that did not start")
            raise
        deaths = self._servers.deaths if self._servers is not None else None
        client = GymClient(self._pool, self._config.row_timeout_s, deaths)
        self._rows = RowServer(
            client,
            self._table,
            EpisodeOptions.of(self._config),
            self._decode,
            self._config.max_connections,
            ledgers,
            self._images,
        )
        return endpoint

    async def _spin_up(self, pool: HttpPool, base_urls: list[str], model_name: str) -> GymEndpoint:
        if self._config.registry_url is not None:
            await wait_for_registry(pool, self._config.registry_url, self._config.spinup_timeout_s)
            self._table = await read_registry(pool, self._config.registry_url)
            return GymEndpoint(self._config.registry_url, self._table.routes)
        self._servers = ServerSet(self._config)
        await self._servers.start(pool, base_urls, model_name, self._policy_pool)
        self._table = self._servers.table
        return GymEndpoint(self._servers.registry_url, self._table.routes)

    async def run_rollouts(
        self, rows: list[Row], timer_prefix: str = "timing/rollout"
    ) -> AsyncIterator[RowResult]:
        """Roll all rows out at once; results as they complete.

        A row that fails is a failure in its place; the others go on. The last result carries the
        timings. Leaving early cancels the requests that are under way, and the servers see it.

        Args:
            rows: All are in flight together, as far as ``max_connections`` allows. Their images,
                and those of the results, cross once for the rows of a task
                (:class:`gymrl.media.MediaExchange`).
            timer_prefix: Put before the timings' names.

        Raises:
            ServerError: The worker is not spun up.
        """
        if self._rows is None:
            raise ServerError("this worker is not spun up: call spin_up first")
        exchange = MediaExchange(rows)
        stream = stream_rows(self._rows, exchange.full_rows(rows), timer_prefix)
        try:
            async for result in stream:
                yield exchange.thin_result(result)
        finally:
            await stream.aclose()

    async def health_check(self) -> None:
        """Ask every server whether it lives.

        Raises:
            ServerDiedError: Names one that does not answer.
            ServerError: The worker is not spun up.
        """
        if self._pool is None:
            raise ServerError("this worker is not spun up: call spin_up first")
        if self._servers is not None:
            await self._servers.check(self._pool)
        elif self._config.registry_url is not None:
            registry = self._config.registry_url.rstrip("/")
            await check_alive(self._pool, {"registry": registry, **self._table.servers})

    async def shutdown(self) -> None:
        """Stop the servers and close the connections. Safe to call twice, and before spin-up."""
        pools = (self._pool, self._policy_pool)
        self._pool = self._policy_pool = None
        servers, self._servers = self._servers, None
        self._rows = None
        self._table = RouteTable({})
        try:
            if servers is not None:
                await servers.stop()
        finally:
            for pool in pools:
                if pool is not None:
                    await pool.close()

    async def close(self) -> None:
        """Shut down."""
        await self.shutdown()


async def _decoder(config: GymConfig) -> DecodeFunction | None:
    if config.tokenizer is None or not config.decode_text:
        return None
    return await anyio.to_thread.run_sync(load_decoder, config.tokenizer)


async def _image_reader(config: GymConfig) -> ImageReader | None:
    if config.media is None:
        return None
    layout = None
    if config.processor is not None:
        # Loads transformers, which workers that read no images can do without.
        from gymrl.media.processing import ImageProcessor  # noqa: PLC0415

        layout = await anyio.to_thread.run_sync(ImageProcessor.load, config.processor)
    return ImageReader(config.media, layout)


def _allow_open_files() -> None:
    """Raise the soft limit on open files: hundreds of rows take a handful of sockets each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        logger.debug("raised the limit on open files from %d to %d", soft, wanted)
