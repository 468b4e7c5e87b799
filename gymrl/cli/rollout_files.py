"""Which file of rollouts an argument means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

ROLLOUTS_FILE = "rollouts.jsonl"


def file_of(path: Path) -> Path:
    """`path` itself, or the rollouts in an evaluation's directory.

    Raises:
        ConfigError: It is not there, or a directory without rollouts.
    """
    if not path.exists():
        raise ConfigError(f"{path}: No such file or directory", setting=str(path))
    if not path.is_dir():
        return path
    inside = path / ROLLOUTS_FILE
    if not inside.is_file():
        raise ConfigError(
            f"{path} is a directory without {ROLLOUTS_FILE}: name a file of rollouts, or the "
            "directory of an evaluation that has begun",
            setting=str(path),
        )
    return inside
