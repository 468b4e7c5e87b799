"""What calls, streams and large arrays cost through actors, and how that compares to the floor.

Run ``python benchmarks/actors/calls.py``; prints JSON. ``*_over_floor`` is a ratio to the raw
echo of :mod:`floor` (lower is better), ``*_of_copy`` to the speed of copying memory (higher is
better).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import numpy.typing as npt
import uvloop

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import floor

from gymrl.actors import Actor, ActorHandle, SpawnOptions, spawn
from gymrl.concurrency import OwnedTasks


class Message(msgspec.Struct):
    """One message of a row, as arrays."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    text: str


class ListMessage(msgspec.Struct):
    """One message of a row, as lists."""

    token_ids: list[int]
    logprobs: list[float]
    text: str


class Bench(Actor):
    """What is measured."""

    async def noop(self) -> None:
        """Do nothing."""

    async def add(self, a: str, b: int) -> list[int]:
        """Return little."""
        return [b]

    async def rows(self, count: int) -> AsyncIterator[list[Message]]:
        """Rows of two messages."""
        ids = np.arange(2048, dtype=np.int32)
        logprobs = np.linspace(-5, 0, 2048, dtype=np.float32)
        text = "six kilobytes of text".ljust(6000, ".")
        for _ in range(count):
            yield [Message(ids, logprobs, text), Message(ids, logprobs, text)]

    async def list_rows(self, count: int) -> AsyncIterator[list[ListMessage]]:
        """The same with lists."""
        ids = list(range(100_000, 102_048))
        logprobs = [-0.001 * i for i in range(2048)]
        text = "six kilobytes of text".ljust(6000, ".")
        for _ in range(count):
            yield [ListMessage(ids, logprobs, text), ListMessage(ids, logprobs, text)]

    async def take(self, array: npt.NDArray[np.uint8]) -> int:
        """Take a large array."""
        return int(array[-1])

    async def take_bytes(self, data: bytes) -> int:
        """Take large bytes."""
        return len(data)


async def _sequential(bench: ActorHandle, calls: int) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for number in range(calls):
            await bench.call("add", "add", number)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


async def _concurrent(bench: ActorHandle, width: int) -> float:
    best = float("inf")
    for _ in range(5):
        tasks = OwnedTasks("bench")
        start = time.perf_counter()
        pending = [tasks.start(bench.call("noop"), "noop") for _ in range(width)]
        await asyncio.wait(pending)
        best = min(best, time.perf_counter() - start)
        await tasks.close()
    return width / best


async def _stream(bench: ActorHandle, method: str, rows: int) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        async for _ in bench.stream(method, rows):
            pass
        best = min(best, time.perf_counter() - start)
    return rows / best


async def _large(bench: ActorHandle, method: str, payload: object, size: int) -> float:
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        await bench.call(method, payload)
        best = min(best, time.perf_counter() - start)
    return size / best


async def measure() -> dict[str, float]:
    """All numbers, by name."""
    size = 64 << 20
    found: dict[str, float] = {}
    async with spawn(Bench) as bench:
        found["sequential_call_us"] = await _sequential(bench, 5000) * 1e6
        found["concurrent_calls_per_s"] = await _concurrent(bench, 4096)
        found["rows_per_s"] = await _stream(bench, "rows", 20_000)
        found["list_rows_per_s"] = await _stream(bench, "list_rows", 3000)
        found["array_bytes_per_s"] = await _large(bench, "take", np.ones(size, np.uint8), size)
        found["bytes_bytes_per_s"] = await _large(bench, "take_bytes", bytes(size), size)
    inline = SpawnOptions(max_segment_bytes=0)
    async with spawn(Bench, options=inline) as bench:
        found["inline_array_bytes_per_s"] = await _large(
            bench, "take", np.ones(size, np.uint8), size
        )
    return found


def main() -> None:
    """Measure and print."""
    round_trip = floor.round_trip_s()
    copy = floor.copy_bytes_per_s()
    found = uvloop.run(measure())
    found["floor_round_trip_us"] = round_trip * 1e6
    found["floor_copy_bytes_per_s"] = copy
    found["sequential_over_floor"] = found["sequential_call_us"] / (round_trip * 1e6)
    found["array_of_copy"] = found["array_bytes_per_s"] / copy
    found["bytes_of_copy"] = found["bytes_bytes_per_s"] / copy
    print(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=2))


if __name__ == "__main__":
    main()
