"""A benchmark's configuration, from its files and the caller's overrides, in the field's format.

A file's ``config_paths`` are included first and its own keys win; then come the keys of an
``env.yaml`` and at last the overrides. Blocks may be made of other blocks
(:mod:`gymrl.benchmark.directives`), and ``${key}`` stands for another key's value, which OmegaConf
resolves where a value is asked for. No command line is read and nothing is kept in the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gymrl.benchmark.directives import apply_directives
from gymrl.benchmark.roots import find_path
from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gymrl.benchmark.roots import BenchmarkSource, SearchRoot

CONFIG_PATHS = "config_paths"
MISSING = "???"


def checked_overrides(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The overrides as a dictionary of its own.

    A dotted key is refused at any depth: merged as a dictionary, ``"judge.model"`` would be one
    key with a dot in its name, while on a command line it sets ``model`` inside ``judge``.

    Raises:
        ConfigError: They are no mapping, or a key has a dot.
    """
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"overrides is a {type(overrides).__name__}; a mapping is needed", setting="overrides"
        )
    _refuse_dotted_keys(overrides, "overrides")
    return dict(overrides)


def _refuse_dotted_keys(node: Any, where: str) -> None:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if isinstance(key, str) and "." in key:
                nested = "{" + ": {".join(repr(part) for part in key.split("."))
                raise ConfigError(
                    f"{where}: the key {key!r} has a dot; write nested mappings instead: "
                    f"{nested}: ...{'}' * (key.count('.') + 1)}",
                    setting=key,
                )
            _refuse_dotted_keys(value, f"{where}[{key!r}]")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            _refuse_dotted_keys(value, f"{where}[{index}]")


def load_config(
    source: BenchmarkSource,
    roots: Sequence[SearchRoot],
    overrides: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> DictConfig:
    """The benchmark's configuration; interpolations are not resolved yet.

    Args:
        source: The benchmark's file.
        roots: Where included files are looked up.
        overrides: Checked by :func:`checked_overrides`; win over every file.
        defaults: Keys for which every file may say otherwise.

    Raises:
        ConfigError: A file is missing or does not parse, or a directive cannot be done.
    """
    layers: list[Any] = [dict(defaults or {})]
    paths: list[str] = []
    _include(source.file, source.config_path, roots, layers, paths)
    layers.append(environment_file(roots))
    try:
        merged = OmegaConf.merge(*layers, source.presets, plain_overrides(overrides))
        container = OmegaConf.to_container(merged, resolve=False)
        assert isinstance(container, dict)
        config = apply_directives({str(key): value for key, value in container.items()})
        config[CONFIG_PATHS] = paths
        return OmegaConf.create(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"benchmark {source.name!r}: {error}", setting="benchmark") from error


def environment_file(roots: Sequence[SearchRoot]) -> dict[str, Any]:
    """The ``env.yaml`` of the first root that has one: what is local, keys above all.

    Raises:
        ConfigError: It does not parse.
    """
    file = find_path("env.yaml", [root for root in roots if root.benchmarks == "benchmarks"])
    return {} if file is None else _load(file)


def plain_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the overrides in what a configuration can hold.

    Raises:
        ConfigError: One is something else.
    """
    plain: dict[str, Any] = _plain(overrides, "overrides")
    return plain


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(
        f"{where} is a {type(value).__name__}; a configuration holds texts, numbers, true, false, "
        "null, lists and mappings",
        setting="overrides",
    )


def _include(
    file: Path, name: str, roots: Sequence[SearchRoot], layers: list[Any], paths: list[str]
) -> None:
    """Add a file's layer behind those of the files that it includes; each file once."""
    paths.append(name)
    layer = _load(file)
    included = layer.get(CONFIG_PATHS) or []
    if not isinstance(included, list) or not all(isinstance(path, str) for path in included):
        raise ConfigError(
            f"{file}: config_paths must be a list of paths, not {included!r}", setting=CONFIG_PATHS
        )
    for path in included:
        if path in paths:
            continue
        found = find_path(path, roots)
        if found is None:
            looked = ", ".join(str(root.path) for root in roots)
            raise ConfigError(
                f"{file}: config_paths names {path!r}, which is in none of: {looked}",
                setting=CONFIG_PATHS,
            )
        _include(found, path, roots, layers, paths)
    layers.append(layer)


def _load(file: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} does not parse: {error}", setting=str(file)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", setting=str(file)) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file} holds no mapping", setting=str(file))
    return {str(key): value for key, value in loaded.items()}


def unresolved(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain data, interpolations as they are written."""
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]  # a mapping stays one
    return plain


def resolved(node: Any, what: str) -> Any:
    """A node of a configuration as plain data, every interpolation resolved.

    Args:
        node: The node, in its place in the tree.
        what: How the error calls it.

    Raises:
        ConfigError: A value is still ``???``, or an interpolation names a key that is not there.
    """
    unset = list(_unset(OmegaConf.to_container(node, resolve=False), ""))
    if unset:
        raise ConfigError(
            f"{what}: {len(unset)} required values are not set (???): {', '.join(unset)}; "
            "set them through overrides",
            setting=unset[0],
        )
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        text = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{what}: {text} (at {getattr(error, 'full_key', None)}); set it through overrides",
            setting=getattr(error, "full_key", None),
        ) from error


def value_of(config: DictConfig, name: str) -> Any:
    """A top-level key's value as plain data, resolved; None where it is not there.

    Raises:
        ConfigError: It is still ``???``, or an interpolation in it names a key that is not there.
    """
    if name not in unresolved(config):
        return None
    if OmegaConf.is_missing(config, name):
        raise ConfigError(f"{name} is not set (???); set it through overrides", setting=name)
    try:
        value = config[name]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        text = str(error).strip().splitlines()[0]
        raise ConfigError(f"{name}: {text}; set it through overrides", setting=name) from error


def _unset(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _unset(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _unset(value, f"{path}[{index}]")
    elif isinstance(node, str) and node == MISSING:
        yield path
