"""Which generator a configuration asks for, and how it is brought up.

Backends are imported here when they are needed: whoever names the service for its actor's class
alone needs neither torch's seconds nor its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from gymrl.errors import ConfigError
from gymrl.extras import install_hint
from gymrl.generation.deferred import DeferredGenerator
from gymrl.routed_experts import routes_dtype

if TYPE_CHECKING:
    from gymrl.config import GenerationConfig, RoutesDtype
    from gymrl.generation.transformers import TransformersGenerator
    from gymrl.generation.vllm import VllmGenerator
    from gymrl.generation.vllm_http import RemoteVllmGenerator

    ServedGenerator = (
        TransformersGenerator | VllmGenerator | RemoteVllmGenerator | DeferredGenerator
    )


async def load_generator(config: GenerationConfig) -> tuple[ServedGenerator, Any]:
    """The generator and the tokenizer; what blocks is done in a thread.

    With ``defer_loading`` the generator comes back at once, its tokenizer alone is loaded.

    Raises:
        ConfigError: The model or the backend is not there, or can't be run as configured.
        GenerationError: The engine did not start, or no server answers.
    """
    try:
        return await _load_now_or_later(config)
    except ModuleNotFoundError as error:
        if not (hint := install_hint(error)):
            raise
        raise ConfigError(
            f"backend={config.backend!r}: {error}{hint}", setting="backend"
        ) from error


async def _load_now_or_later(config: GenerationConfig) -> tuple[ServedGenerator, Any]:
    if not config.defer_loading:
        return await _load(config)
    tokenizer, end_ids, max_model_len = await anyio.to_thread.run_sync(_outline, config)

    async def load() -> TransformersGenerator | VllmGenerator | RemoteVllmGenerator:
        generator, _ = await _load(config)
        return generator

    return DeferredGenerator(load, max_model_len=max_model_len, end_ids=end_ids), tokenizer


async def _load(
    config: GenerationConfig,
) -> tuple[TransformersGenerator | VllmGenerator | RemoteVllmGenerator, Any]:
    if config.backend == "transformers":
        from gymrl.generation.transformers import TransformersGenerator  # noqa: PLC0415

        return await anyio.to_thread.run_sync(TransformersGenerator.load, config)
    if config.vllm.base_urls:
        from gymrl.generation.models import resolve_model  # noqa: PLC0415
        from gymrl.generation.vllm_http import RemoteVllmGenerator  # noqa: PLC0415

        tokenizer, end_ids, _ = await anyio.to_thread.run_sync(_outline, config)
        dtype = await anyio.to_thread.run_sync(_routes_dtype, config)
        generator = await RemoteVllmGenerator.connect(
            config.vllm,
            end_ids,
            config.logprobs_mode,
            dtype,
            resolve_model(config.model),
            config.max_model_len,
        )
        return generator, tokenizer
    from gymrl.generation.vllm import VllmGenerator  # noqa: PLC0415

    return await anyio.to_thread.run_sync(VllmGenerator.load, config)


def _routes_dtype(config: GenerationConfig) -> RoutesDtype | None:
    """Of the routes that servers which run elsewhere return; None where they are not wanted."""
    if not config.return_routed_experts:
        return None
    from gymrl.generation.checkpoints import model_num_experts  # noqa: PLC0415
    from gymrl.generation.models import resolve_model  # noqa: PLC0415

    return routes_dtype(model_num_experts(resolve_model(config.model)))


def _outline(config: GenerationConfig) -> tuple[Any, Sequence[int], int]:
    """The tokenizer, the tokens that end a turn, and the context; no weight is read."""
    from gymrl.generation.checkpoints import load_tokenizer, model_context  # noqa: PLC0415
    from gymrl.generation.models import resolve_model  # noqa: PLC0415

    source = resolve_model(config.model)
    tokenizer, end_ids = load_tokenizer(source)
    return tokenizer, end_ids, config.max_model_len or model_context(source)
