"""The edge to vLLM: starting an engine, asking it, reading its answers and its errors.

Importing this module imports vLLM; :mod:`gymrl.generation.vllm` does so once the environment is
set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec
import numpy.typing as npt

from gymrl.concurrency import closing_stream
from gymrl.errors import (
    ConfigError,
    GenerationError,
    GenerationRequestError,
    GeneratorDiedError,
    GymrlError,
)
from gymrl.extras import optional_imports
from gymrl.generation.base import WeightSpan
from gymrl.generation.images import check_regions
from gymrl.generation.processors import sees_images
from gymrl.generation.vllm_process import children_follow, forked_engine
from gymrl.generation.vllm_sampling import check_temperature, stop_token_ids
from gymrl.generation.weights import INITIAL_VERSION, UNNAMED, WORKER_EXTENSION
from gymrl.routed_experts import count_experts, routes_dtype

with optional_imports():
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.exceptions import VLLMClientError
    from vllm.inputs import TokensPrompt
    from vllm.inputs.engine import tokens_input
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from gymrl.config import GenerationConfig, RoutesDtype, SamplingParams
    from gymrl.generation.images import PromptImages

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = 256 << 20
_ROUTES_REMEDY = (
    ". return_routed_experts needs vLLM's Model Runner V2, which needs Triton and so a GPU; "
    "backend='transformers' returns routes on a CPU"
)


class EnginePart(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer of the engine adds to a generation.

    Attributes:
        token_ids: The tokens that are new.
        logprobs: Of each of them.
        finish_reason: On the last part: vLLM's own word.
        stop_reason: On the last part.
        weight_versions: On the last part: spans over the whole generation.
        routed_experts: On the last part: of prompt and generation, less the last token.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[WeightSpan]
    routed_experts: npt.NDArray[Any] | None = None


class VllmEngine:
    """One AsyncLLM; its errors come out as gymrl's.

    Args:
        engine: Started.
        model: As errors name it.
        returns_routes: It was started to return routes.

    Attributes:
        model: As errors name it.
    """

    def __init__(self, engine: Any, model: str, *, returns_routes: bool = False) -> None:
        self._engine = engine
        self._returns_routes = returns_routes
        self.model = model

    @classmethod
    def start(cls, source: str, config: GenerationConfig) -> VllmEngine:
        """Start the engine's process and load the model; blocks for as long as that takes.

        Args:
            source: What vLLM takes for the model: a directory or a hub id.
            config: Of the generator.

        Raises:
            ConfigError: vLLM refuses the settings.
            GenerationError: The engine did not start.
        """
        on_cpu = bool(current_platform.is_cpu())
        arguments = engine_arguments(source, config, on_cpu=on_cpu)
        with contextlib.ExitStack() as stack:
            stack.enter_context(children_follow())
            if on_cpu:
                stack.enter_context(forked_engine())
            try:
                engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            except (ValueError, TypeError) as error:
                routes = _ROUTES_REMEDY if config.return_routed_experts else ""
                raise ConfigError(
                    f"vLLM refuses the settings of model={config.model!r}: {error}{routes}",
                    setting="vllm.engine_args",
                ) from error
            except RuntimeError as error:
                raise GenerationError(
                    f"vLLM's engine for model={config.model!r} did not start: {error}; its own "
                    "lines above say why"
                ) from error
        return cls(engine, config.model, returns_routes=config.return_routed_experts)

    @property
    def max_model_len(self) -> int:
        """Context in tokens."""
        return int(self._engine.model_config.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return int(self._engine.model_config.get_vocab_size())

    @property
    def routes_dtype(self) -> RoutesDtype | None:
        """The narrowest type for the model's expert ids; None where no routes are returned."""
        if not self._returns_routes:
            return None
        return routes_dtype(count_experts(self._engine.model_config.hf_config))

    @property
    def is_running(self) -> bool:
        """Whether the engine's process lives."""
        return self._engine is not None and not self._engine.errored

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine knows of."""
        return 0 if self._engine is None else int(self._engine.get_num_unfinished_requests())

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        budget: int,
        end_ids: frozenset[int],
        in_parts: bool,
        images: PromptImages | None = None,
    ) -> AsyncIterator[EnginePart]:
        """Ask the engine; cancelling the task that iterates aborts the request.

        Args:
            prompt_ids: The prompt, with the tokens of its images.
            sampling: Of this call.
            budget: Tokens it may sample.
            end_ids: Tokens that end a turn.
            in_parts: Yield tokens as they come; else once, when the call has ended.
            images: That the prompt holds.

        Raises:
            MediaError: The engine makes other tokens of the images than the prompt has.
            GenerationError: Of the fitting kind.
        """
        params = engine_sampling(sampling, budget=budget, end_ids=end_ids, in_parts=in_parts)
        if images is None:
            prompt = tokens_input(list(prompt_ids))
        else:
            prompt = await self._asked(self._with_images(list(prompt_ids), images))
        answers = self._open().generate(prompt, params, uuid.uuid4().hex)
        try:
            async with closing_stream(answers):
                async for answer in answers:
                    yield _part(answer.outputs[0])
        except Exception as error:
            raise self._translated(error) from error

    async def _with_images(self, prompt_ids: list[int], images: PromptImages) -> Any:
        """The prompt as the engine takes it: its images processed, at the places it has for them."""
        pixels = await anyio.to_thread.run_sync(images.opened)
        shortened = TokensPrompt(
            prompt_token_ids=images.shortened(prompt_ids),
            multi_modal_data={"image": pixels},
            multi_modal_uuids={"image": [image.digest for image in images.images]},
        )
        # Not through the cache that holds what the engine's process is believed to have: a call
        # that is cancelled here would leave it believing in an image that was never sent.
        (prompt,) = await self._open().renderer.render_cmpl_async([shortened], skip_mm_cache=True)
        check_regions(prompt_ids, list(prompt["prompt_token_ids"]), images)
        return prompt

    async def pause(self, mode: str) -> None:
        """Stop sampling and empty the caches; what is in flight fares as `mode` says."""
        await self._asked(self._open().pause_generation(mode=mode, clear_cache=True))

    async def resume(self) -> None:
        """Sample again."""
        await self._asked(self._open().resume_generation())

    async def load_weights(self, directory: str, version: str) -> list[str]:
        """Have every worker load a checkpoint, and name it when all did; only while paused.

        Returns:
            What went wrong, by worker; empty when nothing did.
        """
        answers = await self._asked(
            self._open().collective_rpc("gymrl_load_weights", args=(directory,))
        )
        faults = [answer for answer in answers if answer is not None]
        if not faults:
            await self._asked(self._open().update_weight_version(version))
        return faults

    @property
    def transfer_backend(self) -> str | None:
        """What the engine's weight transfer is; None where it was started without."""
        config = self._open().vllm_config.weight_transfer_config
        return None if config is None else str(config.backend)

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Have every worker meet the trainer; blocks the engine for as long."""
        request = WeightTransferInitRequest(init_info=init_info)
        await self._asked(self._open().init_weight_transfer_engine(request))

    async def transfer(self, update_info: dict[str, Any], version: str) -> None:
        """Have every worker take what the trainer sends, and name it; only while paused."""
        engine = self._open()
        await self._asked(engine.start_weight_update())
        request = WeightTransferUpdateRequest(update_info=update_info)
        await self._asked(engine.update_weights(request))
        await self._asked(engine.finish_weight_update(version))
        await self._asked(engine.collective_rpc("gymrl_forget_cache"))

    async def abandon_transfer(self) -> bool:
        """Close a transfer that failed; whether the weights that served may be gone."""
        touched = await self._asked(self._open().collective_rpc("gymrl_abandon_transfer"))
        return any(touched)

    def _open(self) -> Any:
        if self._engine is None:
            raise GenerationError(f"vLLM's engine of {self.model} is closed")
        return self._engine

    async def shut_down(self) -> None:
        """End the engine's process; calls still in flight get no more answers."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if engine.output_handler is not None:
            # It would take the end of the process for an accident.
            engine.output_handler.cancel()
            await asyncio.wait([engine.output_handler])
        context = engine.engine_core.resources.ctx
        # Inside the event loop it would block, and kill the process after 5 s.
        await anyio.to_thread.run_sync(engine.shutdown, abandon_on_cancel=True)
        # The sockets are closed by a callback of this loop, the tasks that read them before that.
        await asyncio.sleep(0)
        context.destroy(linger=0)

    async def _asked(self, answer: Any) -> Any:
        try:
            return await answer
        except Exception as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        match error:
            case GymrlError():
                return error
            case EngineDeadError():
                return GeneratorDiedError(
                    f"vLLM's engine of {self.model} ended while it was asked; start the "
                    "generator again",
                    model=self.model,
                )
            case VLLMClientError():
                return _refusal(error)
            case _:
                cause = error.__cause__ or error
                return GenerationError(
                    f"vLLM could not serve {self.model}: {type(cause).__name__}: {cause}"
                )


def _part(output: Any) -> EnginePart:
    token_ids = list(output.token_ids)
    entries = output.logprobs or []
    return EnginePart(
        token_ids=token_ids,
        logprobs=[
            float(entry[token_id].logprob)
            for token_id, entry in zip(token_ids, entries, strict=False)
        ],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        weight_versions=[
            WeightSpan(
                INITIAL_VERSION if span.version == UNNAMED else span.version, span.start, span.end
            )
            for span in output.weight_versions or ()
        ],
        routed_experts=output.routed_experts,
    )


def engine_arguments(source: str, config: GenerationConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Fields of ``AsyncEngineArgs``; those of `config.vllm.engine_args` have the last word."""
    options = config.vllm
    arguments: dict[str, Any] = {
        "model": source,
        "dtype": config.dtype,
        "logprobs_mode": f"{config.logprobs_mode}_logprobs",
        "tensor_parallel_size": options.tensor_parallel_size,
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # Engines side by side must not sample the same continuations of a prompt without a seed.
        "seed": secrets.randbelow(1 << 31),
    }
    if sees_images(source):
        # No video is ever sent, and the engine sets memory aside for what may be.
        limits = {"image": config.media.max_images_per_row, "video": 0}
        arguments["limit_mm_per_prompt"] = limits
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if options.kv_cache_bytes is not None or on_cpu:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_bytes or CPU_KV_CACHE_BYTES
    if options.enforce_eager if options.enforce_eager is not None else on_cpu:
        arguments["enforce_eager"] = True
    if on_cpu:
        arguments["distributed_executor_backend"] = "uni"
    if config.return_routed_experts:
        arguments["enable_return_routed_experts"] = True
    return {**arguments, **options.engine_args}


def engine_sampling(
    sampling: SamplingParams, *, budget: int, end_ids: frozenset[int], in_parts: bool
) -> VllmSamplingParams:
    """VLLM's parameters for one call.

    Raises:
        GenerationRequestError: A temperature that vLLM would change, or a value that it refuses.
    """
    check_temperature(sampling)
    try:
        return VllmSamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            max_tokens=budget,
            # -1 means "none" to vLLM.
            seed=None if sampling.seed is None else sampling.seed % (1 << 63),
            stop=list(sampling.stop) or None,
            stop_token_ids=stop_token_ids(sampling, end_ids),
            ignore_eos=sampling.ignore_eos,
            logprobs=0,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.DELTA if in_parts else RequestOutputKind.FINAL_ONLY,
        )
    except VLLMClientError as error:
        raise _refusal(error) from error


def _refusal(error: VLLMClientError) -> GenerationRequestError:
    param = getattr(error, "parameter", None)
    return GenerationRequestError(f"vLLM refuses the request: {error}", param=param)
