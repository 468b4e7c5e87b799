"""A benchmark's prepare script: loaded by its path, run in this process, and forgotten.

A script is a Python file with ``prepare(**prepare_script_args) -> Path`` that writes the dataset
and returns where. While it runs, and only then, the benchmark's configuration is there for it to
ask: :func:`prepare_config` for scripts of gymrl's, and ``NEMO_GYM_CONFIG_DICT`` in the environment,
which is where NeMo Gym's own configuration call looks. So one script runs at a time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import yaml
from anyio.from_thread import start_blocking_portal

from gymrl.benchmark.gym_prepare import __file__ as _SCRIPT
from gymrl.config import GymConfig
from gymrl.errors import ConfigError, GymrlError
from gymrl.gym.real_processes import environment
from gymrl.gym.real_question import ask_gym

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gymrl.benchmark.installed_gym import InstalledGym

CONFIG_VARIABLE = "NEMO_GYM_CONFIG_DICT"
_PEER_MODULE = "nemo_gym.global_config"
_PEER_CACHE = "_GLOBAL_CONFIG_DICT"
_MODULE = "gymrl_prepare_script"
_PACKAGE = "benchmarks"

_running = threading.RLock()
_config: ContextVar[dict[str, Any] | None] = ContextVar("prepare_config", default=None)


def prepare_config() -> dict[str, Any]:
    """The configuration of the benchmark whose prepare script is running, overrides included.

    Raises:
        RuntimeError: None is running here.
    """
    config = _config.get()
    if config is None:
        raise RuntimeError("no prepare script is running here")
    return config


def run_prepare_script(
    script: Path, folders: Sequence[Path], arguments: Mapping[str, Any], config: dict[str, Any]
) -> Path:
    """Call a script's ``prepare`` and return the path that it returned.

    Args:
        script: The file.
        folders: Search roots: importable while the script runs, the first ones first, and
            ``benchmarks`` is the package of what they hold.
        arguments: Of ``prepare``.
        config: What the script sees as its configuration.

    Raises:
        ConfigError: The file does not load, has no ``prepare``, or that raised or returned no path.
    """
    with _running, _visible(config), _importable(folders), _benchmarks_package(folders):
        prepare = getattr(_load(script), "prepare", None)
        if not callable(prepare):
            raise ConfigError(
                f"prepare script {script} has no function prepare", setting="prepare_script"
            )
        try:
            returned = prepare(**arguments)
        except GymrlError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(script, error) from error
    if not isinstance(returned, str | os.PathLike):
        raise ConfigError(
            f"prepare script {script} returned {returned!r}; the path of the dataset is needed",
            setting="prepare_script",
        )
    return Path(returned)


def run_in_gym(
    gym: InstalledGym,
    script: Path,
    folders: Sequence[Path],
    arguments: Mapping[str, Any],
    config: dict[str, Any],
) -> Path:
    """As :func:`run_prepare_script`, in a process of the interpreter that has NeMo Gym.

    The process ends with this one. What the script needs beside Gym must be installed there.

    Raises:
        ConfigError: The script failed; with what it raised.
    """
    request = {
        "script": str(script),
        "folders": [str(folder) for folder in folders],
        "arguments": dict(arguments),
    }
    settings = GymConfig(gym_python=gym.python, gym_roots=tuple(request["folders"]))
    variables = environment(settings) | {CONFIG_VARIABLE: _as_yaml(config)}
    with start_blocking_portal() as portal:
        answer = portal.call(
            ask_gym, f"prepare {script.parent.name}", gym.python, _SCRIPT, request, variables
        )
    if "path" not in answer:
        raise ConfigError(
            f"prepare script {script} failed, in {gym.python}: {answer['error']}",
            setting="prepare_script",
        )
    return Path(answer["path"])


def _as_yaml(config: dict[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, script)
    if spec is None or spec.loader is None:
        raise ConfigError(f"prepare script {script} is no Python file", setting="prepare_script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    try:
        spec.loader.exec_module(module)
    except GymrlError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(script, error) from error
    return module


def _failed(script: Path, error: BaseException) -> ConfigError:
    return ConfigError(
        f"prepare script {script} failed: {type(error).__name__}: {error}",
        setting="prepare_script",
    )


@contextlib.contextmanager
def _visible(config: dict[str, Any]) -> Iterator[None]:
    """Make the configuration this process's own, and put everything back after."""
    before = os.environ.get(CONFIG_VARIABLE)
    peer = sys.modules.get(_PEER_MODULE)
    cached = getattr(peer, _PEER_CACHE, None)
    token = _config.set(config)
    os.environ[CONFIG_VARIABLE] = _as_yaml(config)
    if peer is not None:
        setattr(peer, _PEER_CACHE, None)
    try:
        yield
    finally:
        _config.reset(token)
        if before is None:
            os.environ.pop(CONFIG_VARIABLE, None)
        else:
            os.environ[CONFIG_VARIABLE] = before
        # The script may have been the first to import it.
        peer = sys.modules.get(_PEER_MODULE)
        if peer is not None:
            setattr(peer, _PEER_CACHE, cached)


@contextlib.contextmanager
def _importable(folders: Sequence[Path]) -> Iterator[None]:
    """Let the script import what lies in the roots; modules that only they gave are forgotten."""
    path, modules = list(sys.path), set(sys.modules)
    added = [folder for folder in folders if str(folder) not in path]
    sys.path[:0] = [str(folder) for folder in added]
    try:
        yield
    finally:
        sys.path[:] = path
        sys.modules.pop(_MODULE, None)
        for name in set(sys.modules) - modules:
            if _lies_under(sys.modules[name], added):
                del sys.modules[name]


@contextlib.contextmanager
def _benchmarks_package(folders: Sequence[Path]) -> Iterator[None]:
    """Let ``benchmarks`` be the roots' package, whatever else is called so where we run."""
    ours = {name: module for name, module in sys.modules.items() if _is_benchmarks(name)}
    for name in ours:
        del sys.modules[name]
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(folder / _PACKAGE) for folder in folders]
    sys.modules[_PACKAGE] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_benchmarks(name)]:
            del sys.modules[name]
        sys.modules.update(ours)


def _is_benchmarks(name: str) -> bool:
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")


def _lies_under(module: ModuleType, folders: Sequence[Path]) -> bool:
    file = getattr(module, "__file__", None)
    places = [file] if file else list(getattr(module, "__path__", None) or [])
    return any(Path(place).is_relative_to(folder) for place in places for folder in folders)
