"""A generator that another thread's event loop runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gymrl.concurrency import call_across
from gymrl.errors import GenerationRequestError
from gymrl.generation.base import Generated, in_this_loop
from gymrl.generation.images import ImageGenerator, PromptImages

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from gymrl.config import SamplingParams
    from gymrl.generation.base import Generator, TokenCallback


class GeneratorAcross:
    """A generator of another thread's event loop, for any event loop to call.

    Args:
        generator: Whoever opened it closes it.
        portal: Into its event loop.
    """

    def __init__(self, generator: Generator, portal: BlockingPortal) -> None:
        self._generator = generator
        self._portal = portal

    @property
    def max_model_len(self) -> int:
        """Context in tokens, prompt and generation together."""
        return self._generator.max_model_len

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.base.Generator.generate`."""
        deliver = None if on_token is None else in_this_loop(on_token)

        async def sample() -> Generated:
            return await self._generator.generate(prompt_ids, sampling, on_token=deliver)

        return await call_across(self._portal, sample)

    async def generate_with_images(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages,
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.images.ImageGenerator.generate_with_images`."""
        deliver = None if on_token is None else in_this_loop(on_token)
        generator = self._generator
        if not isinstance(generator, ImageGenerator):
            raise GenerationRequestError(f"{type(generator).__name__} samples from tokens only")

        async def sample() -> Generated:
            return await generator.generate_with_images(
                prompt_ids, images, sampling, on_token=deliver
            )

        return await call_across(self._portal, sample)

    async def close(self) -> None:
        """Nothing: whoever opened the generator closes it."""
