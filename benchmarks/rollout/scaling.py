"""Whether a row costs the same, in time and memory, whatever the size of the batch."""

from __future__ import annotations

import gc
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.comparison import Comparison
from benchmarks.rollout.answers import Shape, dataset_row
from benchmarks.rollout.driver import engine_beside_stub

if TYPE_CHECKING:
    from gymrl.rollout.engine import RolloutEngine


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        batches: Rows of each batch, in the order in which they run.
        group: Attempts at a prompt.
        in_flight: At a time.
        shape: Of each rollout.
    """

    batches: tuple[int, ...] = (1000, 1000, 10_000, 1000, 100_000, 1000, 10_000, 1000)
    group: int = 8
    in_flight: int = 256
    shape: Shape = Shape(prompt=32, sampled=32)


TINY = Size(batches=(8, 16, 8), group=2, in_flight=4)


class Measured(msgspec.Struct):
    """One batch.

    Attributes:
        rows: Its size.
        seconds: Of wall time, per row.
        given_bytes: What the driver grew by until the first group came, per row: rows that were
            prepared, and handed to the worker.
        grown_bytes: What it grew by after that, at most, until the last group.
    """

    rows: int
    seconds: float
    given_bytes: float
    grown_bytes: float


async def measure(size: Size) -> list[Comparison]:
    """Time a row, and the driver's memory while groups come and go."""
    async with engine_beside_stub(size.shape, size.in_flight) as (engine, _):
        await _batch(engine, size.batches[0], size)  # connections and caches
        measured = [await _batch(engine, rows, size) for rows in size.batches]
    seconds = {
        rows: statistics.median(one.seconds for one in measured if one.rows == rows)
        for rows in sorted(set(size.batches))
    }
    largest = max(measured, key=lambda one: one.rows)
    grown = {
        f"{rows:,} rows": max(one.grown_bytes for one in measured if one.rows == rows) / 1e6
        for rows in seconds
    }
    return [
        Comparison(
            name="time a row over sizes of batches",
            unit="µs a row",
            sides={f"{rows:,} rows": 1e6 * value for rows, value in seconds.items()},
            ratio="slowest / fastest",
            value=max(seconds.values()) / min(seconds.values()),
            target=1.3,
            at_least=False,
            note="the prompts of a batch are made before, and prepared by the engine in this time",
        ),
        Comparison(
            name="the driver's memory while groups come and go",
            unit="MB",
            sides=grown,
            ratio="growth in the largest batch",
            value=max(grown.values()),
            target=64.0,
            at_least=False,
            note=f"after the first group; before it, the rows given take"
            f" {largest.given_bytes / 1000:.1f} kB each;"
            f" all {largest.rows:,} trajectories together would take"
            f" {largest.rows * 8 * size.shape.tokens / 1e6:,.0f} MB of arrays alone",
        ),
    ]


async def _batch(engine: RolloutEngine, rows: int, size: Size) -> Measured:
    prompts = [dataset_row() for _ in range(rows // size.group)]
    gc.collect()
    before = _resident()
    began = time.perf_counter()
    stream = engine.stream(prompts, num_generations=size.group)
    given = most = seen = 0.0
    async for group in stream:
        given = given or _resident()
        seen += len(group.trajectories)
        if seen % 64 == 0:
            most = max(most, _resident())
    seconds = time.perf_counter() - began
    if seen != rows:
        raise RuntimeError(f"{seen:.0f} of {rows} rows came back")
    return Measured(rows, seconds / rows, (given - before) / rows, max(0.0, most - given))


def _resident() -> float:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return float(int(pages) * os.sysconf("SC_PAGE_SIZE"))
