"""A model of transformers, as its files and its configuration have it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gymrl.errors import ConfigError, UnsupportedOptionError
from gymrl.extras import optional_imports
from gymrl.generation.image_tensors import ImageTensors
from gymrl.generation.processors import sees_images
from gymrl.media.processing import ImageProcessor

with optional_imports():
    import torch
    import transformers

if TYPE_CHECKING:
    from gymrl.config import GenerationConfig


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal, which shows the run's own."""
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers.utils.logging.enable_progress_bar()


def load_model(source: str, config: GenerationConfig) -> Any:
    """The model of `source` in the configured type on the configured device, in eval mode.

    Raises:
        ConfigError: There is no GPU though one is asked for, or the files can't be read.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda': torch sees no GPU here; use 'cpu' or 'auto'", setting="device"
        )
    use_gpu = config.device != "cpu" and torch.cuda.is_available()
    dtype: Any = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        loader = (
            transformers.AutoModelForImageTextToText
            if sees_images(source)
            else transformers.AutoModelForCausalLM
        )
        model = loader.from_pretrained(source, dtype=dtype)
    except Exception as error:  # broken files raise whatever their reader stumbles over
        raise ConfigError(
            f"model={config.model!r} can't be loaded from {source}: {type(error).__name__}: {error}; "
            "look whether its files are whole",
            setting="model",
        ) from error
    return model.to("cuda" if use_gpu else "cpu").eval()


def image_tensors(source: str, model: Any) -> ImageTensors | str:
    """What makes inputs of images, or why there is nothing that does."""
    if not sees_images(source):
        return "the model reads text only"
    try:
        return ImageTensors(ImageProcessor.load(source), model)
    except (ConfigError, UnsupportedOptionError) as error:
        return str(error)


def require_key_value_cache(model: Any) -> None:
    """Refuse a model that keeps another state than a key-value cache.

    Raises:
        ConfigError: It does.
    """
    text_config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or any("linear" in kind for kind in kinds):
        raise ConfigError(
            f"{type(model).__name__} keeps a recurrent state; the embedded generator runs "
            "attention models only, serve this one with vLLM",
            setting="model",
        )


def model_end_ids(model: Any) -> list[int]:
    """End-of-turn tokens that the model's generation config (else its config) names."""
    for source in (getattr(model, "generation_config", None), model.config):
        named = getattr(source, "eos_token_id", None)
        if named is not None:
            return [int(i) for i in named] if isinstance(named, list | tuple) else [int(named)]
    return []


def context_length(model: Any, max_model_len: int | None) -> int:
    """The context in tokens: what is asked for, or the model's own.

    Raises:
        ConfigError: More is asked for than the model has.
    """
    text_config = model.config.get_text_config(decoder=True)
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    if max_model_len is None:
        return own or 4096
    if own is not None and max_model_len > own:
        raise ConfigError(
            f"max_model_len={max_model_len}: the model's own context is {own} tokens",
            setting="max_model_len",
        )
    return max_model_len
