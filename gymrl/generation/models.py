"""From a model's name to something transformers can load.

A name is a directory, a hub id, or one of the shipped names of :data:`SHIPPED`. Shipped models come
from a package registry and are prepared once, in the user's cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gymrl.errors import ConfigError
from gymrl.generation.smollm2 import prepare_smollm2

SHIPPED: dict[str, Callable[[Path], Path]] = {"smollm2": prepare_smollm2}
"""Names of models that gymrl fetches itself, and what prepares them below the cache."""


def cache_directory() -> Path:
    """Where prepared models are kept: ``$GYMRL_CACHE``, else ``gymrl`` in the user's cache."""
    chosen = os.environ.get("GYMRL_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gymrl"


def resolve_model(name: str) -> str:
    """What ``from_pretrained`` takes for `name`: a directory, or a hub id as it is.

    A shipped model is fetched and converted the first time, which takes some seconds and needs
    the package registry.

    Raises:
        ConfigError: The directory does not exist or holds no ``config.json``, or a shipped model
            can't be fetched.
    """
    if name in SHIPPED:
        return str(SHIPPED[name](cache_directory()))
    directory = Path(name).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(
                f"model={name!r}: the directory holds no config.json; name the directory that "
                "save_pretrained wrote",
                setting="model",
            )
        return str(directory)
    if directory.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigError(f"model={name!r}: there is no such directory", setting="model")
    return name
