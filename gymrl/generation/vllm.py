"""vLLM in this process: the generator over its asynchronous engine.

One engine a process; any number of such worker processes side by side, each with its devices. The
event loop is never blocked: the engine starts and ends in a thread, and lives in a child process.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread

from gymrl.concurrency import OwnedTasks, close_within, closing_stream, deadline
from gymrl.errors import (
    DeadlineExceeded,
    GenerationError,
    GeneratorDiedError,
    WeightUpdateError,
)
from gymrl.generation.base import (
    Generated,
    TokenCallback,
    check_prompt,
    check_stop_tokens,
    token_budget,
)
from gymrl.generation.checkpoints import (
    StagedTensors,
    checkpoint_entries,
    directory_manifest,
    load_tokenizer,
    local_checkpoint,
    sweep_staged,
)
from gymrl.generation.models import resolve_model
from gymrl.generation.vllm_process import engine_environment, is_cpu_build
from gymrl.generation.vllm_sampling import generated, with_routes
from gymrl.generation.weight_refusal import sender_told
from gymrl.generation.weights import (
    INITIAL_VERSION,
    DirectoryWeights,
    Manifest,
    PauseMode,
    TensorWeights,
    TransferWeights,
    WeightSource,
    check_update,
    describe,
)

if TYPE_CHECKING:
    from gymrl.config import GenerationConfig, SamplingParams
    from gymrl.generation.images import PromptImages
    from gymrl.generation.vllm_engine import EnginePart, VllmEngine

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0
"""How long :meth:`VllmGenerator.close` waits for the calls in flight to end with ``abort``."""

_ENGINE_ENDED = "vLLM's engine has ended; start the generator again"

SHUTDOWN_TIMEOUT_S = 7.0
"""How long it waits for the engine's process afterwards."""


class VllmGenerator:
    """Samples from a model that a vLLM engine of this process runs.

    Build it with :meth:`load`. It belongs to the event loop of its first call.

    Args:
        engine: Started; the generator closes it.
        source: The directory or hub id that its weights came from.
        end_ids: Tokens that end a turn.
        update_timeout_s: Deadline of what the engine does together with a trainer.
    """

    def __init__(
        self,
        engine: VllmEngine,
        source: str,
        end_ids: Sequence[int],
        *,
        update_timeout_s: float | None = None,
    ) -> None:
        self._engine = engine
        self._max_model_len = engine.max_model_len
        self._vocab_size = engine.vocab_size
        self._routes_dtype = engine.routes_dtype
        self._end_ids = frozenset(end_ids)
        self._tasks = OwnedTasks("vllm", on_error=_told_the_caller)
        self._calls: set[asyncio.Task[Generated]] = set()
        self._closing = False
        self._updates = anyio.Lock()
        self._update_timeout_s = update_timeout_s
        self._source: str | None = source
        self._transfer: tuple[str, dict[str, Any]] | None = None
        self._manifest: Manifest | None = None
        self._weight_version = INITIAL_VERSION
        self._staged: StagedTensors | None = None
        self._broken: str | None = None

    @classmethod
    def load(cls, config: GenerationConfig) -> tuple[Self, Any]:
        """Start the engine; blocks for as long as that takes. Call it in a thread.

        It sets environment variables of this process (see :mod:`gymrl.generation.vllm_process`).

        Returns:
            The generator, and the tokenizer.

        Raises:
            ConfigError: vLLM is not installed, or it refuses the model or the settings.
            GenerationError: The engine did not start.
        """
        source = resolve_model(config.model)
        sweep_staged()
        os.environ.update(engine_environment(config, on_cpu=is_cpu_build(), environ=os.environ))
        module = importlib.import_module("gymrl.generation.vllm_engine")
        tokenizer, end_ids = load_tokenizer(source)
        engine = module.VllmEngine.start(source, config)
        seconds = config.vllm.update_timeout_s
        return cls(engine, source, end_ids, update_timeout_s=seconds), tokenizer

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
        """Whether calls can be served."""
        return self.fault is None

    @property
    def fault(self) -> str | None:
        """Why no call can be served, or None where they can."""
        if self._closing:
            return "the generator is closed"
        if not self._engine.is_running:  # an update can't mend it
            return _ENGINE_ENDED
        if self._broken is None:
            return None
        return (
            f"the weights of the engine are unknown after an update failed: {self._broken}; "
            "update them again, or start the generator again"
        )

    @property
    def num_running(self) -> int:
        """Requests that the engine knows of."""
        return self._engine.num_unfinished

    @property
    def weight_version(self) -> str:
        """Version of the weights that serve now."""
        return self._weight_version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.base.Generator.generate`.

        Raises:
            GeneratorDiedError: The engine's process ended.
        """
        return await self._call(prompt_ids, None, sampling, on_token)

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
            GeneratorDiedError: The engine's process ended.
        """
        return await self._call(prompt_ids, images, sampling, on_token)

    async def _call(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages | None,
        sampling: SamplingParams,
        on_token: TokenCallback | None,
    ) -> Generated:
        self._check_open()
        check_prompt(prompt_ids, self._vocab_size)
        check_stop_tokens(sampling, self._vocab_size)
        budget = token_budget(len(prompt_ids), sampling, self._max_model_len)
        # A task of its own: vLLM aborts a cancelled request with an await, which the cancel scope
        # of our caller would interrupt.
        call = self._tasks.start(
            self._sample(list(prompt_ids), images, sampling, budget, on_token), "generate"
        )
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait([call])
        finally:
            if not call.done():
                call.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([call])
        if call.cancelled():
            if not self._closing:
                raise GeneratorDiedError("vLLM's engine was ended under the call")
            raise GenerationError("the generator closed under the call")
        return call.result()

    async def _sample(
        self,
        prompt_ids: list[int],
        images: PromptImages | None,
        sampling: SamplingParams,
        budget: int,
        on_token: TokenCallback | None,
    ) -> Generated:
        token_ids: list[int] = []
        logprobs: list[float] = []
        last: EnginePart | None = None
        parts = self._engine.stream(
            prompt_ids,
            sampling,
            budget=budget,
            end_ids=self._end_ids,
            in_parts=on_token is not None,
            images=images,
        )
        async with closing_stream(parts):
            async for last in parts:
                token_ids += last.token_ids
                logprobs += last.logprobs
                if on_token is not None:
                    for token_id, logprob in zip(last.token_ids, last.logprobs, strict=True):
                        on_token(token_id, logprob)
        answer = generated(
            token_ids,
            logprobs,
            finish_reason=last.finish_reason if last else None,
            stop_reason=last.stop_reason if last else None,
            sampling=sampling,
            weight_versions=last.weight_versions if last else [],
        )
        given = last.routed_experts if last else None
        return with_routes(answer, given, self._routes_dtype, len(prompt_ids))

    async def weight_takers(self) -> list[str]:
        """The model of the engine, if it was started for transfers of weights; else nothing."""
        return [] if self._engine.transfer_backend is None else [self._engine.model]

    async def update_weights(
        self, source: WeightSource, version: str, *, pause: PauseMode = "keep"
    ) -> None:
        """See :meth:`gymrl.generation.weights.UpdatableGenerator.update_weights`.

        Tensors are written once to shared memory, where the engine reads them; they stay there
        until the next update, for that is where a failed one goes back to. After an update that
        failed twice over (neither the new weights nor the old ones could be loaded) every call is
        refused until an update succeeds.
        """
        async with sender_told(source), self._updates:
            check_update(version, pause)
            try:
                await self._update(source, version, pause)
            except GenerationError as error:
                raise self._update_error(error, source, version) from error

    async def _update(self, source: WeightSource, version: str, pause: PauseMode) -> None:
        if self._closing:
            raise WeightUpdateError("the generator is closed")
        if isinstance(source, TransferWeights):
            await self._update_by_transfer(source, version, pause)
            return
        # A thread can't be cancelled, and what it made must not be lost.
        with anyio.CancelScope(shield=True):
            directory, staged = await anyio.to_thread.run_sync(self._prepared, source)
        try:
            await self._switch(lambda: self._load(directory, version), pause)
        except BaseException:
            if staged is not None:
                staged.remove()
            raise
        self._took(version, directory, staged)

    def _took(self, version: str, directory: str | None, staged: StagedTensors | None) -> None:
        self._source, self._weight_version = directory, version
        previous, self._staged = self._staged, staged
        if previous is not None:
            previous.remove()

    async def _update_by_transfer(
        self, source: TransferWeights, version: str, pause: PauseMode
    ) -> None:
        backend = self._engine.transfer_backend
        if source.backend != backend:
            raise WeightUpdateError(
                f"the engine's weight transfer is {backend or 'off'}; start it with vllm."
                f"engine_args: {{weight_transfer_config: {{backend: {source.backend}}}}}"
            )
        offered, meeting = source.offered(), source.for_engine(0, 1).meeting
        with anyio.CancelScope(shield=True):
            manifest = await anyio.to_thread.run_sync(self._known_manifest)
            if offered is not None:
                manifest.check(offered)
            if self._transfer != meeting:
                self._transfer = None
                await self._with_trainer(self._engine.init_transfer(meeting[1]))
                self._transfer = meeting
        await self._switch(lambda: self._receive(source, version), pause)
        self._took(version, None, None)

    async def _receive(self, source: TransferWeights, version: str) -> None:
        try:
            await self._with_trainer(self._engine.transfer(source.update_info, version))
        except GeneratorDiedError:
            raise
        except GenerationError as error:
            # The trainer may be gone: whoever comes next is met anew.
            self._transfer = None
            if not await self._engine.abandon_transfer():
                raise
            await self._go_back([str(error)])

    async def _with_trainer(self, work: Awaitable[None]) -> None:
        """What the engine does together with the trainer, and can't be called back from.

        Raises:
            GeneratorDiedError: It took too long, so the engine was ended.
        """
        try:
            with deadline(
                self._update_timeout_s, "the transfer of weights", "vllm.update_timeout_s"
            ):
                await work
        except DeadlineExceeded as error:
            self._broken = error.message
            for call in list(self._calls):
                call.cancel()
            if self._calls:
                await asyncio.wait(self._calls)
            await close_within(self._engine.shut_down(), SHUTDOWN_TIMEOUT_S, "vLLM's engine")
            raise GeneratorDiedError(
                f"{error.message}; the engine waits for the trainer and hears nothing else, so it "
                "was ended: start the generator again"
            ) from error

    def _known_manifest(self) -> Manifest:
        """What checkpoints of the model hold; its first ones are still its source when it is read."""
        if self._manifest is None:
            self._source = local_checkpoint(self._source or "")
            self._manifest = directory_manifest(self._source)
        return self._manifest

    def _prepared(
        self, source: DirectoryWeights | TensorWeights
    ) -> tuple[str, StagedTensors | None]:
        """Where the engine finds the weights, now that they are known to fit."""
        manifest = self._known_manifest()
        if isinstance(source, DirectoryWeights):
            manifest.check(checkpoint_entries(source.path))
            return os.path.abspath(source.path), None
        manifest.check(describe(source.tensors))
        staged = StagedTensors(source.tensors)
        return str(staged.path), staged

    async def _load(self, directory: str, version: str) -> None:
        faults = await self._engine.load_weights(directory, version)
        if faults:
            await self._go_back(faults)

    async def _switch(self, load: Callable[[], Awaitable[None]], pause: PauseMode) -> None:
        try:
            await self._engine.pause(pause)
            with anyio.CancelScope(shield=True):
                await load()
                self._broken = None
        finally:
            if self._engine.is_running and self._broken is None:
                with anyio.CancelScope(shield=True):
                    await self._engine.resume()

    async def _go_back(self, faults: list[str]) -> None:
        text = f"vLLM could not load them: {'; '.join(dict.fromkeys(faults))}"
        if self._source is None:
            again = ["they came by transfer, and are nowhere else"]
        else:
            again = await self._engine.load_weights(self._source, self._weight_version)
        if again:
            self._broken = f"{text}; nor the ones before: {again[0]}"
            # What was frozen must not go on over weights that nobody knows.
            await self._engine.pause("abort")
            raise WeightUpdateError(self._broken)
        raise WeightUpdateError(text)

    def _update_error(
        self, error: GenerationError, source: WeightSource, version: str
    ) -> WeightUpdateError:
        serves = self._engine.is_running and self._broken is None and not self._closing
        rest = f"version {self._weight_version!r} goes on serving" if serves else "nothing serves"
        return WeightUpdateError(
            f"weights {version!r} from {source} were not taken: {error}; {rest}",
            version=version,
            serving=self._weight_version if serves else None,
            source=str(source),
            num_engines=error.num_engines if isinstance(error, WeightUpdateError) else None,
        )

    def _check_open(self) -> None:
        fault = self.fault
        if fault is not None:
            raise (GeneratorDiedError if fault == _ENGINE_ENDED else GenerationError)(fault)

    async def close(self) -> None:
        """See :meth:`gymrl.generation.base.Generator.close`; takes a few seconds at most."""
        if self._closing:
            return
        self._closing = True
        with anyio.CancelScope(shield=True):
            if self._calls and self._engine.is_running:
                await close_within(self._abort_calls(), ABORT_TIMEOUT_S, "calls in flight")
            await close_within(self._engine.shut_down(), SHUTDOWN_TIMEOUT_S, "vLLM's engine")
            await self._tasks.close()
        if self._staged is not None:
            self._staged.remove()

    async def _abort_calls(self) -> None:
        await self._engine.pause("abort")
        if self._calls:
            await asyncio.wait(self._calls)


def _told_the_caller(error: BaseException) -> None:
    """The call that started the task raises its error."""
