"""The generator as an actor: one process that holds the model and serves it over HTTP."""

from __future__ import annotations

import logging
import resource

import anyio
import anyio.to_thread
import msgspec

from gymrl.actors import Actor
from gymrl.concurrency import close_within
from gymrl.config import GenerationConfig  # noqa: TC001 - actors read annotations at run time
from gymrl.errors import GenerationError
from gymrl.generation.base import fault_of
from gymrl.generation.chat import ChatFormat
from gymrl.generation.deferred import DeferredGenerator
from gymrl.generation.image_inputs import load_image_reader
from gymrl.generation.ledger import LedgerBook
from gymrl.generation.loading import load_generator
from gymrl.generation.policy import Policy
from gymrl.generation.server import GenerationServer
from gymrl.generation.weights import PauseMode, WeightSource, adopt_weights, weight_takers

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class GenerationEndpoint(msgspec.Struct, frozen=True):
    """Where a generator is served.

    Attributes:
        base_url: With ``/v1``.
        model: The name that requests use.
        max_model_len: Context in tokens.
    """

    base_url: str
    model: str
    max_model_len: int


class GenerationService(Actor):
    """Loads a model, serves it, and closes both."""

    async def setup(self, config: GenerationConfig) -> None:
        """Load the model in a thread, or begin to; the event loop stays free.

        Raises:
            ConfigError: The model is not there or is of a kind that can't be run.
        """
        self._config = config
        self._server: GenerationServer | None = None
        self._endpoint: GenerationEndpoint | None = None
        self._generator, tokenizer = await load_generator(config)
        try:
            chat = await anyio.to_thread.run_sync(
                ChatFormat.from_config, tokenizer, config, tuple(self._generator.end_ids)
            )
            images = await anyio.to_thread.run_sync(load_image_reader, config, chat)
        except BaseException:
            await close_within(self._generator.close(), CLOSE_TIMEOUT_S, "the generator")
            raise
        self._policy = Policy(
            self._generator,
            chat,
            model_name=config.served_model_name,
            aliases=(config.model,),
            on_rewrite=config.on_rewrite,
            images=images,
        )

    async def start(self) -> GenerationEndpoint:
        """Start the server; asked again, say where it is.

        Raises:
            ServerStartError: The address can't be listened on.
        """
        if self._endpoint is not None:
            return self._endpoint
        _raise_open_file_limit()
        self._server = GenerationServer(
            self._policy,
            host=self._config.host,
            port=self._config.port,
            max_body_bytes=self._config.max_body_bytes,
            ledgers=LedgerBook(self._config.ledger_max_bytes, self._config.ledger_max_age_s),
        )
        base_url = await self._server.start()
        self._endpoint = GenerationEndpoint(
            base_url=base_url,
            model=self._config.served_model_name,
            max_model_len=self._generator.max_model_len,
        )
        logger.info("serving %s at %s", self._config.model, base_url)
        return self._endpoint

    async def health_check(self) -> None:
        """Return while the generator runs.

        Raises:
            GenerationError: It serves no calls any more; the text says why.
        """
        fault = fault_of(self._generator)
        if fault is not None:
            raise GenerationError(f"the generator of {self._config.model} does not serve: {fault}")

    async def wait_ready(self) -> None:
        """Wait for a model whose loading was deferred; else return at once.

        Raises:
            ConfigError: The model or the backend is not there, or can't be run as configured.
            GenerationError: The engine did not start.
        """
        if isinstance(self._generator, DeferredGenerator):
            await self._generator.wait_ready()

    async def weight_version(self) -> str:
        """Version of the weights that serve now."""
        return self._generator.weight_version

    async def update_weights(
        self, source: WeightSource, version: str, pause: PauseMode = "keep"
    ) -> None:
        """See :meth:`gymrl.generation.weights.UpdatableGenerator.update_weights`.

        Raises:
            WeightUpdateError: They were not taken; the old ones serve on.
        """
        await self._generator.update_weights(source, version, pause=pause)

    async def weight_takers(self) -> list[str]:
        """See :func:`gymrl.generation.weights.weight_takers`; waits for the model.

        Raises:
            GenerationError: The generator does not serve.
        """
        await self.wait_ready()
        return await weight_takers(self._generator)

    async def adopt_weights(self, version: str) -> None:
        """See :func:`gymrl.generation.weights.adopt_weights`.

        Raises:
            WeightsLostError: The generator that died had them alone.
        """
        await self.wait_ready()
        await adopt_weights(self._generator, version)

    async def close(self) -> None:
        """End calls in flight, close the server and the generator. Safe to call twice."""
        server, self._server, self._endpoint = self._server, None, None
        if server is not None:
            await server.stop_listening()
        # First the generator: its calls end with `abort`, and the server can still answer them.
        await close_within(self._generator.close(), CLOSE_TIMEOUT_S, "the generator")
        if server is not None:
            await close_within(server.close(), CLOSE_TIMEOUT_S, "the generation server")


def _raise_open_file_limit() -> None:
    """Thousands of agents may call at once, each on a connection of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
