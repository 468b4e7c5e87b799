"""Large arrays between two processes of one node, beside copying memory."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from benchmarks.actors.floor import copy_s
from benchmarks.actors.subject import Bench
from benchmarks.comparison import Comparison, Measure, Turns, take_turns
from gymrl.actors import ActorHandle, spawn

if TYPE_CHECKING:
    from benchmarks.peers.process import Peer

COPYING = "copying memory"


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        size: Bytes of an array.
        count: Arrays in a turn.
        rounds: Turns.
        many: Arrays while memory is watched.
    """

    size: int = 64 << 20
    count: int = 20
    rounds: int = 4
    many: int = 1000


TINY = Size(size=2 << 20, count=2, rounds=1, many=20)


async def measure(size: Size, ray: Peer | None, xoscar: Peer | None) -> list[Comparison]:
    """Speed in both directions, and memory."""
    array, target = np.ones(size.size, np.uint8), np.zeros(size.size, np.uint8)

    async with spawn(Bench) as bench:

        async def sent() -> float:
            began = time.perf_counter()
            for _ in range(size.count):
                await bench.call("take", array)
            return time.perf_counter() - began

        async def received() -> float:
            began = time.perf_counter()
            for _ in range(size.count):
                if (await bench.call("give", size.size)).nbytes != size.size:
                    raise RuntimeError("an array came back torn")
            return time.perf_counter() - began

        async def copied() -> float:
            return copy_s(array, target, size.count)

        peers: dict[str, Measure] = {
            name: partial(peer.seconds, "tensors", size=size.size, count=size.count)
            for name, peer in (("Ray", ray), ("xoscar", xoscar))
            if peer is not None
        }
        there = await take_turns(sent, {COPYING: copied, **peers}, size.rounds)
        back = await take_turns(received, {COPYING: copied}, size.rounds)
        growth = await _growth(bench, array, size)
    return [
        _speed("to the worker", there, size),
        _speed("from the worker", back, size),
        growth,
    ]


def _speed(direction: str, turns: Turns, size: Size) -> Comparison:
    return Comparison(
        name=f"{size.count} arrays of {size.size >> 20} MiB {direction}",
        unit="GB/s",
        sides=turns.rates(size.size * size.count / 1e9),
        ratio="gymrl / copying memory",
        value=turns.times_faster(COPYING),
        best=turns.best_faster(COPYING),
        target=0.5,
        at_least=True,
    )


async def _growth(bench: ActorHandle, array: np.ndarray, size: Size) -> Comparison:
    """Resident memory of both processes while many arrays go there and back."""
    step = max(1, size.many // 20)
    resident: list[float] = []
    for number in range(size.many):
        await bench.call("take", array)
        if number % 10 == 9:
            await bench.call("give", size.size)
        if number % step == step - 1:
            resident.append((_resident(os.getpid()) + _resident(bench.pid)) / 1e6)
    return Comparison(
        name=f"memory over {size.many:,} arrays",
        unit="MB, driver and worker",
        sides={"after a tenth": resident[1], "most later": max(resident[2:])},
        ratio="most resident later / after a tenth",
        value=max(resident[2:]) / resident[1],
        target=1.02,
        at_least=False,
    )


def _resident(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
