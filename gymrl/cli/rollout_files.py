"""Which file of rollouts an argument means."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ROLLOUTS_FILE = "rollouts.jsonl"


def file_of(path: Path) -> Path:
    """`path` itself, or the rollouts in an evaluation's directory."""
    inside = path / ROLLOUTS_FILE
    return inside if inside.is_file() else path
