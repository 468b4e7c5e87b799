"""The embedded default generator: a transformers model and a continuous-batching decode loop.

For small models on a CPU or one GPU. One thread runs every forward pass, so the event loop never
waits for one; callers await a future. With `max_batch_size` 1 each request runs alone and its
tokens are a function of the prompt, the seed and the weights, bit for bit. In larger batches the
matrix products of a row may differ in their last bits with the batch's shape.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread

from gymrl.errors import GenerationError, GenerationRequestError, WeightUpdateError
from gymrl.extras import optional_imports
from gymrl.generation.base import (
    Generated,
    TokenCallback,
    check_prompt,
    check_stop_tokens,
    in_this_loop,
    token_budget,
)
from gymrl.generation.checkpoints import load_tokenizer
from gymrl.generation.decode_request import Detokenize, Request, settle
from gymrl.generation.decoding import DecodeBatch
from gymrl.generation.image_tensors import ImageTensors
from gymrl.generation.model_loading import (
    context_length,
    image_tensors,
    load_model,
    model_end_ids,
    require_key_value_cache,
    without_progress_bars,
)
from gymrl.generation.models import resolve_model
from gymrl.generation.route_capture import RouteCapture
from gymrl.generation.weight_exchange import Tensors, WeightUpdate, copy_weights, read_weights
from gymrl.generation.weight_refusal import sender_told
from gymrl.generation.weights import INITIAL_VERSION, PauseMode, WeightSource, check_update

with optional_imports():
    import torch

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gymrl.config import GenerationConfig, LogprobsMode, SamplingParams
    from gymrl.generation.images import PromptImages

logger = logging.getLogger(__name__)


class TransformersGenerator:
    """Samples from a transformers causal language model.

    Args:
        model: On its device, in eval mode.
        max_batch_size: Sequences decoded together.
        max_model_len: Context in tokens; None is the model's own.
        end_ids: Tokens that end a turn; None reads the model's generation config.
        logprobs_mode: See :class:`~gymrl.config.GenerationConfig`.
        detokenize: Ids to text with special tokens kept; needed for stop texts only.
        num_threads: Torch's intra-op threads; None is torch's default.
        return_routed_experts: Return the experts that each token went through.
        images: Makes the model's inputs of images; a text: why it has none.

    Raises:
        ConfigError: The model keeps a state other than a key-value cache, its context is shorter
            than `max_model_len`, or it has no experts though routes are asked for.
    """

    def __init__(  # noqa: PLR0913 - keyword-only settings of one object
        self,
        model: Any,
        *,
        max_batch_size: int = 16,
        max_model_len: int | None = None,
        end_ids: Sequence[int] | None = None,
        logprobs_mode: LogprobsMode = "processed",
        detokenize: Detokenize | None = None,
        num_threads: int | None = None,
        return_routed_experts: bool = False,
        images: ImageTensors | str = "the model reads text only",
    ) -> None:
        require_key_value_cache(model)
        self._images = images
        self.model = model
        self._max_batch_size = max_batch_size
        self._max_model_len = context_length(model, max_model_len)
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._end_ids = frozenset(model_end_ids(model) if end_ids is None else end_ids)
        self._detokenize = detokenize
        self._num_threads = num_threads
        self._capture = RouteCapture(model) if return_routed_experts else None
        image_token_id = None
        if isinstance(images, ImageTensors) and images.takes_token_types:
            image_token_id = images.image_token_id
        self._batch = DecodeBatch(
            model, logprobs_mode, INITIAL_VERSION, self._capture, image_token_id
        )
        self._waiting: deque[Request] = deque()
        self._updates: deque[WeightUpdate] = deque()
        self._joining: list[Request] = []
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="gymrl-decode", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, config: GenerationConfig) -> tuple[Self, Any]:
        """Load the model and its tokenizer; blocks for as long as that takes.

        Returns:
            The generator, and the tokenizer.

        Raises:
            ConfigError: The model is not there, or is of a kind this generator can't run.
        """
        source = resolve_model(config.model)
        with without_progress_bars():
            model = load_model(source, config)
        tokenizer, end_ids = load_tokenizer(source)
        generator = cls(
            model,
            max_batch_size=config.max_batch_size,
            max_model_len=config.max_model_len,
            end_ids=end_ids,
            logprobs_mode=config.logprobs_mode,
            detokenize=tokenizer.decode,
            num_threads=config.num_threads,
            return_routed_experts=config.return_routed_experts,
            images=image_tensors(source, model),
        )
        return generator, tokenizer

    @property
    def max_model_len(self) -> int:
        """Context in tokens, prompt and generation together."""
        return self._max_model_len

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return self._end_ids

    @property
    def is_running(self) -> bool:
        """Whether the decoding thread lives."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._batch.requests) + len(self._joining)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.base.Generator.generate`."""
        return await self._sample(prompt_ids, None, sampling, on_token)

    async def generate_with_images(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages,
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.images.ImageGenerator.generate_with_images`."""
        if isinstance(self._images, str):
            raise GenerationRequestError(f"no images can be shown here: {self._images}")
        inputs = await anyio.to_thread.run_sync(self._images.of, images.images)
        return await self._sample(prompt_ids, inputs, sampling, on_token)

    async def _sample(
        self,
        prompt_ids: Sequence[int],
        images: Tensors | None,
        sampling: SamplingParams,
        on_token: TokenCallback | None,
    ) -> Generated:
        check_prompt(prompt_ids, self._vocab_size)
        check_stop_tokens(sampling, self._vocab_size)
        request = Request(
            prompt_ids,
            sampling,
            budget=token_budget(len(prompt_ids), sampling, self._max_model_len),
            end_ids=self._end_ids,
            detokenize=self._detokenize,
            deliver=None if on_token is None else in_this_loop(on_token),
            images=images,
        )
        with self._wake:
            if self._closing:
                raise GenerationError("the generator is closed")
            self._waiting.append(request)
            self._wake.notify()
        # Cancelling this await cancels the future, which the thread reads before its next step.
        return await asyncio.wrap_future(request.future)

    @property
    def weight_version(self) -> str:
        """Version of the weights that serve now."""
        return self._batch.version

    async def update_weights(
        self, source: WeightSource, version: str, *, pause: PauseMode = "keep"
    ) -> None:
        """See :meth:`gymrl.generation.weights.UpdatableGenerator.update_weights`."""
        async with sender_told(source):
            check_update(version, pause)
            try:
                tensors = await anyio.to_thread.run_sync(self._read_weights, source)
                update = WeightUpdate(tensors, version, pause)
                self._take_turn(update)
                await _until_settled(update.future)
            except WeightUpdateError as error:
                raise self._update_error(error, source, version) from error

    def _update_error(
        self, error: WeightUpdateError, source: WeightSource, version: str
    ) -> WeightUpdateError:
        serving = None if self._closing else self.weight_version
        rest = "nothing serves" if serving is None else f"version {serving!r} goes on serving"
        return WeightUpdateError(
            f"weights {version!r} from {source} were not taken: {error}; {rest}",
            version=version,
            serving=serving,
            source=str(source),
        )

    def _take_turn(self, update: WeightUpdate) -> None:
        with self._wake:
            if self._closing:
                raise WeightUpdateError("the generator is closed")
            self._updates.append(update)
            self._wake.notify()

    def _read_weights(self, source: WeightSource) -> Tensors:
        with without_progress_bars():
            return read_weights(self.model, source)

    async def close(self) -> None:
        """See :meth:`gymrl.generation.base.Generator.close`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join)
        if self._capture is not None:
            self._capture.close()

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while self._wait_for_work():
            try:
                self._iterate()
            except Exception as error:  # every caller gets it; the loop goes on for the next ones
                logger.exception("a forward pass failed")
                self._fail(error)
        for request in self._outstanding():
            settle(request.future, request.finished("abort"))
        for update in self._updates:
            settle(update.future, WeightUpdateError("the generator closed before the update"))

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False when closing."""
        with self._wake:
            while not (self._waiting or self._batch.requests or self._updates or self._closing):
                self._wake.wait()
            return not self._closing

    def _iterate(self) -> None:
        self._batch.drop_cancelled()
        self._exchange_weights()
        if not self._updates:
            self._admit()
        if self._joining:
            self._batch.join(self._joining)
            self._joining = []
        elif self._batch.requests:
            self._batch.step()

    def _exchange_weights(self) -> None:
        """Take the updates whose turn it is; one that waits for calls to end holds up new ones."""
        while self._updates:
            update = self._updates[0]
            if update.pause == "wait" and self._batch.requests and not update.future.cancelled():
                return
            with self._wake:
                self._updates.popleft()
            # From here on the caller can't take it back.
            if not update.future.set_running_or_notify_cancel():
                continue
            if update.pause == "abort":
                for request in self._batch.requests:
                    settle(request.future, request.finished("abort"))
                self._batch.clear()
            try:
                copy_weights(self.model, update.tensors)
            except BaseException as error:
                update.future.set_exception(WeightUpdateError(f"copying them failed: {error}"))
                raise
            self._batch.version = update.version
            update.future.set_result(None)
            if self._batch.requests:
                self._batch.recompute()

    def _admit(self) -> None:
        """Move waiting requests into free places."""
        with self._wake:
            free = self._max_batch_size - len(self._batch.requests)
            while self._waiting and len(self._joining) < free:
                request = self._waiting.popleft()
                if not request.future.cancelled():
                    self._joining.append(request)

    def _outstanding(self) -> list[Request]:
        """Every unsettled request; nobody holds them afterwards."""
        with self._wake:
            found = {
                id(request): request
                for request in (*self._batch.requests, *self._joining, *self._waiting)
                if not request.future.done()
            }
            self._batch.clear()
            self._joining = []
            self._waiting.clear()
        return list(found.values())

    def _fail(self, error: Exception) -> None:
        for request in self._outstanding():
            failure = GenerationError(f"generation failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            settle(request.future, failure)


async def _until_settled(future: Future[None]) -> None:
    """Wait for the outcome; cancelled after the work has begun, wait for its end first."""
    settled = asyncio.wrap_future(future)
    try:
        await asyncio.wait([settled])
    except asyncio.CancelledError:
        if not future.cancel():
            with anyio.CancelScope(shield=True):
                await asyncio.wait([settled])
            settled.exception()
        raise
    settled.result()
