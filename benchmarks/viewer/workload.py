"""A file of rollouts of any size, written as a run writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gymrl.records import RowRecord, RunRecord, SamplingRecord, TrajectoryRecord
from gymrl.types import Reward, Turn

if TYPE_CHECKING:
    from pathlib import Path

GROUP = 8
_DISTINCT = 64
_PROMPT = "Compute the sum of the numbers in the table, and say how you came to it. " * 4


def write_file(path: Path, size: int, tokens: int = 4000) -> int:
    """Write about `size` bytes; rows of two turns with 500 to `tokens` tokens.

    Returns:
        How many rows there are.
    """
    random = np.random.default_rng(0)
    trajectories = [
        _trajectory(random, int(random.integers(500, tokens))) for _ in range(_DISTINCT)
    ]
    encoder = msgspec.json.Encoder()
    task = msgspec.Raw(
        encoder.encode(
            {"responses_create_params": {"input": [{"role": "user", "content": _PROMPT}]}}
        )
    )
    rows = 0
    with path.open("wb") as file:
        written = file.write(encoder.encode(RunRecord(config_digest="sha256:0")) + b"\n")
        while written < size:
            group, attempt = divmod(rows, GROUP)
            record = RowRecord(
                group=group,
                group_size=GROUP,
                index=rows,
                task_index=group,
                rollout_index=attempt,
                route="table",
                rollout_id=f"run-{group}-{attempt}",
                task_digest=f"sha256:{group:064x}",
                sampling=SamplingRecord(temperature=1.0, max_tokens=2048),
                task=task,
                trajectory=trajectories[int(random.integers(_DISTINCT))],
            )
            written += file.write(encoder.encode(record) + b"\n")
            rows += 1
    return rows


def _trajectory(random: np.random.Generator, length: int) -> TrajectoryRecord:
    prompt = length // 4
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[prompt:] = -random.exponential(0.5, length - prompt)
    middle = (prompt + length) // 2
    turns = (
        Turn(
            start=0,
            generation_start=prompt,
            end=middle,
            generation_text="x" * 4 * (middle - prompt),
        ),
        Turn(start=middle, generation_start=middle + 10, end=length, generation_text="y" * 400),
    )
    return TrajectoryRecord(
        agent="table_agent",
        token_ids=random.integers(0, 150_000, length).tolist(),
        logprobs=logprobs.tolist(),
        turns=turns,
        reward=Reward(float(random.integers(2))),
        result=msgspec.Raw(b'{"reward":1.0,"response":{"output":[]}}'),
    )
