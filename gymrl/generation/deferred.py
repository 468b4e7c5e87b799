"""A generator whose model is still being loaded: its URL can be given out in the meantime.

Environments take as long to start as models do. With a deferred generator both start at once: the
server listens, says 503 on ``/health`` and to calls, and serves as soon as the model is there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import anyio

from gymrl.concurrency import OwnedTasks
from gymrl.errors import GenerationError, WeightUpdateError
from gymrl.generation.base import fault_of
from gymrl.generation.images import ImageGenerator
from gymrl.generation.weight_refusal import sender_told
from gymrl.generation.weights import INITIAL_VERSION, adopt_weights, weight_takers

if TYPE_CHECKING:
    from gymrl.config import SamplingParams
    from gymrl.generation.base import Generated, TokenCallback
    from gymrl.generation.images import PromptImages
    from gymrl.generation.weights import PauseMode, UpdatableGenerator, WeightSource

logger = logging.getLogger(__name__)


class NotReadyError(GenerationError):
    """The model is still being loaded."""


class LoadFailedError(GenerationError):
    """The model could not be loaded; the text says why."""


class DeferredGenerator:
    """Loads a generator in the background and then stands for it.

    Args:
        load: Makes the generator; called at once, in the running event loop.
        max_model_len: Context in tokens, as far as it is known before.
        end_ids: Tokens that end a turn.
    """

    def __init__(
        self,
        load: Callable[[], Awaitable[UpdatableGenerator]],
        *,
        max_model_len: int,
        end_ids: Sequence[int],
    ) -> None:
        self._load = load
        self._max_model_len = max_model_len
        self._end_ids = frozenset(end_ids)
        self._generator: UpdatableGenerator | None = None
        self._failure: Exception | None = None
        self._is_closed = False
        self._tasks = OwnedTasks("deferred")
        self._loading: asyncio.Task[None] = self._tasks.start(self._run(), "load")

    async def _run(self) -> None:
        try:
            self._generator = await self._load()
        except Exception as error:
            logger.exception("the model could not be loaded")
            self._failure = error

    @property
    def is_ready(self) -> bool:
        """Whether calls are served."""
        return self._generator is not None and self.is_running

    @property
    def is_loading(self) -> bool:
        """Whether the model may still come."""
        return self._generator is None and self.is_running

    @property
    def is_running(self) -> bool:
        """Whether the generator runs, or may still come to."""
        return self.fault is None

    @property
    def fault(self) -> str | None:
        """Why no call will be served any more, or None while the generator runs or may come to."""
        if self._failure is not None:
            return f"the model could not be loaded: {self._failure}"
        if self._is_closed:
            return "the generator is closed"
        return None if self._generator is None else fault_of(self._generator)

    async def wait_ready(self) -> None:
        """Wait for the model.

        Raises:
            Exception: What loading it raised.
        """
        await asyncio.wait([self._loading])
        if self._failure is not None:
            raise self._failure
        self._check()

    @property
    def max_model_len(self) -> int:
        """Context in tokens, prompt and generation together."""
        return self._max_model_len if self._generator is None else self._generator.max_model_len

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return self._end_ids

    @property
    def weight_version(self) -> str:
        """Version of the weights that serve now."""
        return INITIAL_VERSION if self._generator is None else self._generator.weight_version

    def _check(self) -> UpdatableGenerator:
        if self._failure is not None:
            # One of its own for each call: an error that is raised again grows by its stack.
            raise LoadFailedError(str(self.fault)) from self._failure
        if self._is_closed:
            raise GenerationError("the generator is closed")
        if self._generator is None:
            raise NotReadyError("the model is still being loaded; ask again when /health says so")
        return self._generator

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.base.Generator.generate`.

        Raises:
            NotReadyError: The model is still being loaded.
            LoadFailedError: It could not be.
        """
        return await self._check().generate(prompt_ids, sampling, on_token=on_token)

    async def generate_with_images(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages,
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.images.ImageGenerator.generate_with_images`.

        Raises:
            NotReadyError: The model is still being loaded.
            LoadFailedError: It could not be.
        """
        generator = self._check()
        if not isinstance(generator, ImageGenerator):
            raise GenerationError(f"{type(generator).__name__} samples from tokens only")
        return await generator.generate_with_images(prompt_ids, images, sampling, on_token=on_token)

    async def update_weights(
        self, source: WeightSource, version: str, *, pause: PauseMode = "keep"
    ) -> None:
        """See :meth:`gymrl.generation.weights.UpdatableGenerator.update_weights`."""
        async with sender_told(source):
            try:
                generator = self._check()
            except GenerationError as error:
                raise WeightUpdateError(
                    f"weights {version!r} from {source} were not taken: {error}",
                    version=version,
                    source=str(source),
                ) from error
        await generator.update_weights(source, version, pause=pause)

    async def weight_takers(self) -> list[str]:
        """See :func:`gymrl.generation.weights.weight_takers`."""
        return await weight_takers(self._check())

    async def adopt_weights(self, version: str) -> None:
        """See :func:`gymrl.generation.weights.adopt_weights`."""
        await adopt_weights(self._check(), version)

    async def close(self) -> None:
        """Close the generator, once it is loaded: a thread that loads can't be stopped."""
        self._is_closed = True
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._loading])
            if self._generator is not None:
                await self._generator.close()
            await self._tasks.close()
