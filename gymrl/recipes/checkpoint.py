"""Checkpoints that a kill at any moment leaves whole: written aside, then renamed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

_NAME = re.compile(r"step_(\d{8})\.pt")
_KEPT = 2
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def latest(directory: str | Path) -> Path | None:
    """The newest checkpoint of a run, if there is one."""
    found = sorted(path for path in Path(directory).glob("step_*.pt") if _NAME.match(path.name))
    return found[-1] if found else None


def step_of(path: Path) -> int:
    """Steps that were done when a checkpoint was written."""
    return int(path.stem.removeprefix("step_"))


def save(
    directory: str | Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
) -> None:
    """Write the state after `step` steps; a collective, as sharded states are gathered.

    Rank 0 writes; the two newest are kept.

    Args:
        directory: Made if missing; reachable from every node for a resume.
        step: Steps done.
        model: Plain, in DDP, or sharded by FSDP2.
        optimizer: Its optimizer.
        extra: Plain data.
    """
    weights, moments = get_state_dict(model, optimizer, options=_WHOLE)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"step_{step:08d}.pt"
    aside = target.with_suffix(".part")
    with aside.open("wb") as file:
        torch.save({"step": step, "model": weights, "optimizer": moments, "extra": extra}, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(target)
    for old in sorted(root.glob("step_*.pt"))[:-_KEPT]:
        old.unlink()


def load(
    path: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Any]]:
    """Put a checkpoint's state into a model and its optimizer, on every rank.

    Returns:
        Steps done, and the plain data.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_WHOLE,
    )
    return int(state["step"]), dict(state["extra"])
