"""Writes the rows of a shipped benchmark whose tasks are generated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.benchmark.catalogue import load_benchmark

if TYPE_CHECKING:
    from collections.abc import Mapping


def prepare(
    benchmark: str,
    path: str,
    num_tasks: int,
    seed: int,
    sampling: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    **params: Any,
) -> Path:
    """Generate the tasks and write them.

    Args:
        benchmark: The name in the catalogue.
        path: The file.
        num_tasks: How many.
        seed: Decides the tasks.
        sampling: Request fields that every row gets (``temperature``, ``max_output_tokens``).
        settings: Further parameters of the benchmark, as one mapping.
        **params: The benchmark's own parameters; null leaves one to the benchmark.
    """
    given = {k: v for k, v in {**(settings or {}), **params}.items() if v is not None}
    made = load_benchmark(benchmark, num_tasks=num_tasks, seed=seed, params=given)
    file = Path(path)
    with file.open("wb") as lines:
        for row in made.rows:
            request = row["responses_create_params"] | dict(sampling)
            lines.write(msgspec.json.encode(row | {"responses_create_params": request}) + b"\n")
    return file
