"""Which models see images, and their processors, as transformers has them."""

from __future__ import annotations

from typing import Any

from gymrl.errors import ConfigError
from gymrl.extras import optional_imports
from gymrl.generation.models import resolve_model

with optional_imports():
    import transformers

_IMAGE_TOKEN_FIELDS = ("image_token_id", "image_token_index")


def sees_images(model: str) -> bool:
    """Whether a model has a vision tower, by its configuration."""
    config = transformers.AutoConfig.from_pretrained(resolve_model(model))
    return getattr(config, "vision_config", None) is not None


def load_processor(model: str) -> tuple[Any, int]:
    """A model's processor, and the token that its images become.

    The processor and its tokenizer are objects of their own, which nothing else uses.

    Raises:
        ConfigError: It can't be loaded, often for a package that it needs, or the model's
            configuration names no token for images.
    """
    source = resolve_model(model)
    try:
        processor = transformers.AutoProcessor.from_pretrained(source)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(
            f"the processor of model={model!r} can't be loaded: {error}", setting="model"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise ConfigError(
            f"model={model!r} sees images, but its directory has no image processor "
            "(preprocessor_config.json)",
            setting="model",
        )
    config = transformers.AutoConfig.from_pretrained(source)
    for field in _IMAGE_TOKEN_FIELDS:
        token_id = getattr(config, field, None)
        if token_id is not None:
            return processor, int(token_id)
    raise ConfigError(
        f"the configuration of model={model!r} names none of {', '.join(_IMAGE_TOKEN_FIELDS)}",
        setting="model",
    )
