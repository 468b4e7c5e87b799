"""A thousand workers, one after the other and a few at once: nothing of them is left."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import psutil

from gymrl.actors import Actor, SpawnOptions, connect_actor, serve_actor, spawn

AT_ONCE = 4


class Small(Actor):
    async def setup(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("as asked")

    async def double(self, number: int) -> int:
        return 2 * number

    async def count(self, number: int) -> AsyncIterator[int]:
        for item in range(number):
            yield item


async def one(number: int, in_process: bool) -> None:
    """One life, of one of several kinds."""
    options = SpawnOptions(heartbeat_timeout_s=30.0)
    if number % 10 == 9:
        try:
            await spawn(Small, in_process=in_process, options=options, fails=True)
        except RuntimeError:
            return
    async with spawn(Small, in_process=in_process, options=options) as small:
        assert await small.call("double", number) == 2 * number
        async for item in small.stream("count", 10):
            if item == number % 12:
                break
        if number % 4 == 0:
            small.kill()


async def many(count: int, in_process: bool, resident: list[int]) -> float:
    began = time.monotonic()
    for start in range(0, count, AT_ONCE):
        async with anyio.create_task_group() as group:
            for number in range(start, min(start + AT_ONCE, count)):
                group.start_soon(one, number, in_process)
        resident.append(psutil.Process().memory_info().rss)
    return time.monotonic() - began


async def links(count: int) -> None:
    secret = b"a secret for the soak run"
    async with serve_actor(Small, secret=secret) as server:
        for number in range(count):
            async with connect_actor(Small, server.host, server.port, secret=secret) as small:
                assert await small.call("double", number) == 2 * number


async def run(processes: int, in_process: int) -> dict[str, Any]:
    """Spawn so many of each kind; returns the figures."""
    resident: list[int] = []
    seconds = await many(processes, False, resident)
    middle = resident[len(resident) // 2]
    end = resident[-1]
    await many(in_process, True, [])
    await links(in_process)
    return {
        "processes": processes,
        "in_process": in_process,
        "links": in_process,
        "seconds_per_process": round(seconds / max(1, processes), 3),
        "resident_mib": [middle >> 20, end >> 20],
    }
