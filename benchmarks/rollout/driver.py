"""What a whole engine costs a row, beside a bare loop that posts and decodes."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Self

import aiohttp
import anyio
import anyio.lowlevel
import msgspec

from benchmarks.comparison import Comparison, take_turns
from benchmarks.rollout.answers import Shape, dataset_row, prepared_row
from benchmarks.rollout.stub_agent import StubAgent
from gymrl.actors import SpawnOptions, spawn
from gymrl.concurrency import gather_bounded
from gymrl.config import GymConfig, RolloutConfig
from gymrl.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        rows: In a turn.
        in_flight: At a time.
        group: Attempts at a prompt.
        rounds: Turns.
        shape: Of each rollout.
    """

    rows: int = 2048
    in_flight: int = 512
    group: int = 8
    rounds: int = 7
    shape: Shape = Shape()


TINY = Size(rows=8, in_flight=4, group=2, rounds=1)


@contextlib.asynccontextmanager
async def engine_beside_stub(
    shape: Shape, in_flight: int
) -> AsyncIterator[tuple[RolloutEngine, str]]:
    """An engine of one worker, and the URL that its rows are posted to."""
    async with spawn(StubAgent, options=SpawnOptions(name="agent"), shape=shape) as agent:
        config = RolloutConfig(
            gym=GymConfig(registry_url=await agent.call("registry_url"), max_connections=in_flight)
        )
        async with RolloutEngine(config) as engine:
            yield engine, await agent.call("run_url")


async def stream_all(engine: RolloutEngine, prompts: int, group: int) -> float:
    """Seconds of rolling out so many prompts; every row must be there."""
    rows = [dataset_row() for _ in range(prompts)]
    seen = 0
    began = time.perf_counter()
    async for done in engine.stream(rows, num_generations=group):
        seen += len(done.trajectories)
    seconds = time.perf_counter() - began
    if seen != prompts * group:
        raise RuntimeError(f"{seen} of {prompts * group} rows came back")
    return seconds


async def measure(size: Size) -> list[Comparison]:
    """Wall time a row, and the driver's own processor time."""
    driver_cpu: list[float] = []
    async with engine_beside_stub(size.shape, size.in_flight) as (engine, url):

        async def ours() -> float:
            before = time.process_time()
            seconds = await stream_all(engine, size.rows // size.group, size.group)
            driver_cpu.append(time.process_time() - before)
            return seconds

        async with BareLoop(url, size) as bare, BareLoop(url, size, keeps_open=True) as open_:
            loops = {"bare loop": bare.run, "bare loop over open connections": open_.run}
            turns = await take_turns(ours, loops, size.rounds)
    rows = size.rows
    ratio = turns.times_longer("bare loop")
    best = turns.best_faster("bare loop")
    shown = {name: 1e6 * value / rows for name, value in turns.medians().items()}
    shown["gymrl's driver (processor time)"] = 1e6 * sorted(driver_cpu)[len(driver_cpu) // 2] / rows
    return [
        Comparison(
            name=f"a row at {size.in_flight} in flight",
            unit="µs a row",
            sides=shown,
            ratio="gymrl / a bare POST loop that decodes, a connection a row on both sides",
            value=ratio,
            best=None if best is None else 1 / best,
            target=1.2,
            at_least=False,
            note=f"{size.shape.tokens:,} tokens a rollout; the engine prepares, rolls out in one"
            f" worker, groups and scores; {os.cpu_count()} CPUs run stub, worker and driver",
        )
    ]


class BareLoop:
    """What anybody would write first: post rows, decode the answers, keep nothing.

    Args:
        url: Of the agent.
        size: How many rows.
        keeps_open: Use connections again, which gymrl doesn't: a second answer of the agent would
            be taken for that of another row.
    """

    def __init__(self, url: str, size: Size, *, keeps_open: bool = False) -> None:
        self._url = url
        self._size = size
        self._keeps_open = keeps_open
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, force_close=not self._keeps_open)
        self._session = aiohttp.ClientSession(connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def run(self) -> float:
        """Seconds of all rows."""
        session = self._session
        if session is None:
            raise RuntimeError("use the loop inside `async with`")
        bodies = [prepared_row(index).body for index in range(self._size.rows)]
        headers = {"Content-Type": "application/json"}

        async def post(body: bytes) -> float:
            async with session.post(self._url, data=body, headers=headers) as response:
                return float((await response.json())["reward"])

        began = time.perf_counter()
        rewards = await gather_bounded(post, bodies, self._size.in_flight)
        seconds = time.perf_counter() - began
        if sum(rewards) != len(bodies):
            raise RuntimeError("a row came back without its reward")
        await anyio.lowlevel.checkpoint()
        return seconds
