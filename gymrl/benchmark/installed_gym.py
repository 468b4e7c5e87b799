"""The NeMo Gym that is installed: in which interpreter, in which folder, which version.

It is found by its path and asked about in a process of its own; no process of gymrl imports it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from gymrl.errors import ConfigError

GYM_PYTHON_VARIABLE = "GYMRL_GYM_PYTHON"
_COMMAND = "ng_run"
"""A command that every NeMo Gym installs beside its interpreter, and nobody else."""

_ASK_TIMEOUT_S = 60.0
_QUESTION = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("nemo_gym")
folder = next(iter(spec.submodule_search_locations)) if spec else None
try:
    version = importlib.metadata.version("nemo-gym")
except importlib.metadata.PackageNotFoundError:
    version = "unknown"
print(json.dumps({"folder": folder, "version": version}))
"""


class InstalledGym(msgspec.Struct, frozen=True):
    """Where NeMo Gym is.

    Attributes:
        python: The interpreter that has it.
        folder: Holds its ``benchmarks``, ``resources_servers`` and so on.
        version: Its version; ``unknown`` where it is not installed as a package.
    """

    python: str
    folder: Path
    version: str

    @property
    def is_ours(self) -> bool:
        """Whether this process runs in the same interpreter."""
        return self.python == sys.executable


class _Answer(msgspec.Struct, frozen=True):
    folder: str | None
    version: str


def find_gym(gym_python: str | None = None) -> InstalledGym | None:
    """The NeMo Gym to use: the first that is there of these.

    `gym_python`; the interpreter that ``GYMRL_GYM_PYTHON`` names; this interpreter; the one of an
    activated environment, which has ``ng_run`` in ``PATH``.

    Args:
        gym_python: A path, or a command in ``PATH``.

    Returns:
        None where there is none; then nobody has named one.

    Raises:
        ConfigError: The interpreter that was named cannot be started, or has no NeMo Gym.
    """
    named = [(gym_python, "gym_python"), (os.environ.get(GYM_PYTHON_VARIABLE), GYM_PYTHON_VARIABLE)]
    for python, setting in named:
        if python:
            return _asked(python, setting)
    folder = own_gym_folder()
    if folder is not None:
        return InstalledGym(sys.executable, folder, _own_version())
    command = shutil.which(_COMMAND)
    beside = Path(command).with_name("python") if command is not None else None
    return _asked(str(beside), "PATH") if beside is not None and beside.exists() else None


def own_gym_folder() -> Path | None:
    """The folder of a NeMo Gym in this interpreter, without importing it."""
    spec = importlib.util.find_spec("nemo_gym")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


def _own_version() -> str:
    try:
        return importlib.metadata.version("nemo-gym")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _asked(python: str, setting: str) -> InstalledGym:
    expanded = os.path.expanduser(python)
    # Symbolic links stay: an interpreter knows its environment by the path it is called by.
    path = os.path.abspath(expanded) if os.sep in expanded else shutil.which(expanded)
    try:
        if path is None:
            raise FileNotFoundError(f"there is no {expanded} in PATH")
        done = subprocess.run(
            [path, "-P", "-c", _QUESTION],
            capture_output=True,
            check=True,
            timeout=_ASK_TIMEOUT_S,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        said = getattr(error, "stderr", None) or b""
        raise ConfigError(
            f"{setting}={python!r} cannot be asked for its NeMo Gym: {error}"
            f"{said.decode(errors='replace')[-500:]}",
            setting=setting,
        ) from error
    if answer.folder is None:
        raise ConfigError(
            f"{setting}={python!r} has no NeMo Gym; install nemo-gym there, or name another "
            "interpreter",
            setting=setting,
        )
    return InstalledGym(path, Path(answer.folder).resolve().parent, answer.version)
