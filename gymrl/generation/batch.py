"""The batch face of generation: right-padded tensors in, right-padded tensors out.

:class:`BatchGenerator` gives any generator (embedded, vLLM, servers by URL) the two calls that
trainers written around batches use: ``generate`` blocks for the whole batch, ``generate_async``
yields samples as they finish. A batch is a plain dictionary with the keys of
:class:`GenerationDatumSpec`, an answer one with those of :class:`GenerationOutputSpec`.

::

    with BatchGenerator.open(GenerationConfig(model="smollm2")) as policy:
        output = policy.generate({"input_ids": ids, "input_lengths": lengths})
        output["output_ids"], output["logprobs"], output["truncated"]
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio
import msgspec
from anyio.from_thread import start_blocking_portal

from gymrl.concurrency import (
    OwnedTasks,
    close_within,
    closing_stream,
    gather_bounded,
    refuse_running_loop,
    stream_across,
)
from gymrl.config import GenerationConfig, MediaConfig, SamplingParams
from gymrl.errors import (
    ConfigError,
    ContextOverflowError,
    GenerationError,
    GenerationRequestError,
    GymrlError,
)
from gymrl.generation.across import GeneratorAcross
from gymrl.generation.base import Generated, check_logprobs
from gymrl.generation.batch_media import located_images
from gymrl.generation.batch_spec import (
    GenerationDatumSpec,
    GenerationOutputSpec,
    column,
    output_of,
    prompts_of,
    refuse_settings,
    verify_right_padding,
)
from gymrl.generation.chat import ChatFormat
from gymrl.generation.image_inputs import RequestImageReader, load_image_reader
from gymrl.generation.images import ImageGenerator, PromptImages
from gymrl.generation.loading import load_generator

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from gymrl.generation.base import Generator

__all__ = [
    "BatchGenerator",
    "GenerationDatumSpec",
    "GenerationOutputSpec",
    "verify_right_padding",
]

CLOSE_TIMEOUT_S = 10.0


class _Request(msgspec.Struct, frozen=True):
    sample: int
    prompt_ids: list[int]
    sampling: SamplingParams
    images: PromptImages | None = None


class BatchGenerator:
    """A generator with a batch face.

    Args:
        generator: Owned by the caller. Where it belongs to an event loop (vLLM, servers by URL),
            use ``generate_async`` in that loop, or :meth:`open`, which keeps a loop for it.
        pad_token_id: Of inputs, which are checked for it, and of outputs.
        sampling: Of every sample; the batch's own columns come on top.
        portal: Into the loop that `generator` belongs to; None: the loop of each call.
        images: How the model's prompts hold images, and their limits; None: batches with images
            are refused.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        pad_token_id: int,
        sampling: SamplingParams | None = None,
        portal: BlockingPortal | None = None,
        images: RequestImageReader | None = None,
    ) -> None:
        self.pad_token_id = pad_token_id
        self.sampling = sampling or SamplingParams()
        self._generator = generator
        self._portal = portal
        self._images = images or RequestImageReader(
            None, MediaConfig(), "this BatchGenerator has no image format; give it as images"
        )

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        config: GenerationConfig,
        *,
        sampling: SamplingParams | None = None,
        pad_token_id: int | None = None,
    ) -> Iterator[Self]:
        """Load a model, start an engine or connect to servers, and close them at the end. Blocks.

        The generator lives in an event loop of its own, in a thread; both faces may then be used
        from plain code and from any event loop.

        Args:
            config: What to generate with; settings of an HTTP server have no effect.
            sampling: As for the class.
            pad_token_id: None: the tokenizer's pad token, else its end of text.

        Raises:
            RuntimeError: An event loop runs in this thread.
            ConfigError: The model or the backend is not there, or can't be run as configured; or
                there is no token to pad with.
            GenerationError: The engine did not start, or no server answers.
        """
        refuse_running_loop("BatchGenerator(generator, pad_token_id=...) over a generator of it")
        eager = msgspec.structs.replace(config, defer_loading=False)
        with start_blocking_portal("asyncio") as portal:
            generator, tokenizer = portal.call(load_generator, eager)
            try:
                yield cls(
                    generator,
                    pad_token_id=_pad_token(tokenizer) if pad_token_id is None else pad_token_id,
                    sampling=sampling,
                    portal=portal,
                    images=_image_reader(config, tokenizer),
                )
            finally:
                portal.call(_close, generator)

    @property
    def max_model_len(self) -> int:
        """Context in tokens, prompt and generation together."""
        return self._generator.max_model_len

    @property
    def generator(self) -> Generator:
        """The generator itself, one sample at a time; after :meth:`open` from any event loop."""
        if self._portal is None:
            return self._generator
        return GeneratorAcross(self._generator, self._portal)

    def generate(
        self, data: Mapping[str, Any] | GenerationDatumSpec, greedy: bool = False
    ) -> GenerationOutputSpec:
        """One continuation of every sample. Blocks until all are there.

        Interrupting it (Ctrl-C) aborts the requests.

        Args:
            data: The batch; not changed.
            greedy: Take the likeliest token always.

        Returns:
            In the order of the batch. A prompt that fills the context comes back as it was, with
            no token sampled and ``truncated`` set.

        Raises:
            RuntimeError: An event loop runs in this thread.
            GenerationRequestError: The batch is malformed, with the sample and the column; nothing
                ran.
            ContextOverflowError: A prompt is longer than the context, with the sample; nothing ran.
            MediaError: An image is broken, or a prompt does not hold the regions of its images,
                with the sample; nothing ran.
            GenerationError: A sample failed, or its call was aborted; the other requests were
                aborted.
        """
        refuse_running_loop("generate_async")
        prompts = self._prompts(data)
        requests = self._requests(prompts, data, greedy)
        if self._portal is None:
            answers = asyncio.run(self._all(requests, data))
        else:
            future = self._portal.start_task_soon(self._all, requests, data)
            try:
                answers = future.result()
            except BaseException:
                future.cancel()
                raise
        return self._output(prompts, answers, data)

    async def generate_async(
        self, data: Mapping[str, Any] | GenerationDatumSpec, greedy: bool = False
    ) -> AsyncGenerator[tuple[int, GenerationOutputSpec], None]:
        """Samples as they finish: the place in the batch, and a batch of that one alone.

        Leaving early (``aclose``, or cancellation of the consumer) aborts the requests that run
        and waits for their end.

        Args:
            data: As for :meth:`generate`.
            greedy: As there.

        Raises:
            GymrlError: As there, when the first sample is asked for or in its turn.
        """
        prompts = self._prompts(data)
        requests = self._requests(prompts, data, greedy)
        portal = self._portal
        if portal is None:
            stream = self._completed(requests, data)
        else:
            stream = stream_across(portal, lambda: self._completed(requests, data))
        async with closing_stream(stream) as answers:
            async for sample, answer in answers:
                yield sample, self._output([prompts[sample]], [answer], data)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Always ready, for callers that announce a phase of generation."""
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing to wind down, for callers that announce the end of such a phase."""
        return True

    def _prompts(self, data: Mapping[str, Any] | GenerationDatumSpec) -> list[list[int]]:
        prompts = prompts_of(data, self.pad_token_id)
        for sample, prompt in enumerate(prompts):
            if len(prompt) > self.max_model_len:
                raise ContextOverflowError(
                    f"sample {sample} of the batch: the prompt holds {len(prompt)} tokens, and the "
                    f"context {self.max_model_len}; shorten it or raise max_model_len",
                    prompt_tokens=len(prompt),
                    max_model_len=self.max_model_len,
                )
        return prompts

    def _requests(
        self,
        prompts: Sequence[list[int]],
        data: Mapping[str, Any] | GenerationDatumSpec,
        greedy: bool,
    ) -> list[_Request]:
        count = len(prompts)
        refuse_settings(data)
        stops = column(data, "stop_strings", count)
        seeds = column(data, "seeds", count)
        limits = column(data, "max_new_tokens", count)
        base = self.sampling
        if greedy:
            base = msgspec.structs.replace(base, temperature=0.0, top_p=1.0, top_k=None)
        requests = []
        for sample, prompt in enumerate(prompts):
            try:
                own = msgspec.structs.replace(
                    base,
                    stop=tuple(dict.fromkeys((*base.stop, *(stops[sample] or ())))),
                    seed=base.seed if seeds[sample] is None else seeds[sample],
                    max_tokens=_least(base.max_tokens, limits[sample]),
                )
            except ConfigError as error:
                raise GenerationRequestError(
                    f"sample {sample} of the batch: {error}", param=error.setting
                ) from error
            requests.append(_Request(sample, prompt, own))
        return requests

    async def _all(
        self, requests: Sequence[_Request], data: Mapping[str, Any] | GenerationDatumSpec
    ) -> list[Generated]:
        return await gather_bounded(self._one, await self._with_images(requests, data))

    async def _with_images(
        self, requests: Sequence[_Request], data: Mapping[str, Any] | GenerationDatumSpec
    ) -> list[_Request]:
        prompts = [request.prompt_ids for request in requests]
        images = await located_images(prompts, data, self._images)
        if any(images) and not isinstance(self._generator, ImageGenerator):
            raise GenerationRequestError(
                f"the batch has images, and {type(self._generator).__name__} samples from tokens "
                "only",
                param="vllm_images",
            )
        return [
            msgspec.structs.replace(request, images=shown)
            for request, shown in zip(requests, images, strict=True)
        ]

    async def _completed(
        self, requests: Sequence[_Request], data: Mapping[str, Any] | GenerationDatumSpec
    ) -> AsyncGenerator[tuple[int, Generated], None]:
        send, receive = anyio.create_memory_object_stream[tuple[int, Generated]](math.inf)
        told: list[BaseException] = []  # the await below raises it
        tasks = OwnedTasks("batch-generation", on_error=told.append)

        async def one(request: _Request) -> None:
            send.send_nowait((request.sample, await self._one(request)))

        async def run() -> None:
            with send:
                await gather_bounded(one, await self._with_images(requests, data))

        try:
            task = tasks.start(run(), "samples")
            async for answer in receive:
                yield answer
            await task
        finally:
            with anyio.CancelScope(shield=True):
                await tasks.close()
            receive.close()

    async def _one(self, request: _Request) -> Generated:
        where = f"sample {request.sample} of the batch"
        if len(request.prompt_ids) == self.max_model_len:
            return Generated(token_ids=[], logprobs=[], finish_reason="length")
        try:
            generated = await _generate(self._generator, request)
            check_logprobs(generated)
        except GymrlError as error:
            raise type(error).rebuild(f"{where}: {error.message}", error.fields) from error
        if generated.finish_reason == "abort":
            raise GenerationError(
                f"{where}: the call was aborted after {len(generated.token_ids)} tokens (the "
                "generator closed, or its weights were updated with pause='abort')"
            )
        return generated

    def _output(
        self,
        prompts: Sequence[list[int]],
        answers: Sequence[Generated],
        data: Mapping[str, Any] | GenerationDatumSpec,
    ) -> GenerationOutputSpec:
        device = getattr(data["input_ids"], "device", None)
        return output_of(prompts, answers, self.pad_token_id, device)


async def _generate(generator: Generator, request: _Request) -> Generated:
    if request.images is None:
        return await generator.generate(request.prompt_ids, request.sampling)
    assert isinstance(generator, ImageGenerator)
    return await generator.generate_with_images(
        request.prompt_ids, request.images, request.sampling
    )


async def _close(generator: Generator) -> None:
    await close_within(generator.close(), CLOSE_TIMEOUT_S, "the generator")


def _least(first: int | None, second: Any) -> int | None:
    if second is None:
        return first
    return int(second) if first is None else min(first, int(second))


def _image_reader(config: GenerationConfig, tokenizer: Any) -> RequestImageReader:
    if not getattr(tokenizer, "chat_template", None):
        refusal = "images are found by the chat template, and the tokenizer has none"
        return RequestImageReader(None, config.media, refusal)
    return load_image_reader(config, ChatFormat.from_config(tokenizer, config))


def _pad_token(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return int(token)
    raise ConfigError(
        "the tokenizer has neither a pad nor an end-of-text token; give pad_token_id",
        setting="pad_token_id",
    )
