"""How late the event loops of worker and driver wake up while long rollouts are read."""

from __future__ import annotations

import time

import anyio
import msgspec

from benchmarks.comparison import Comparison
from benchmarks.rollout.answers import Shape, dataset_row
from benchmarks.rollout.stub_agent import StubAgent
from gymrl.actors import SpawnOptions, spawn
from gymrl.concurrency import OwnedTasks
from gymrl.config import GymConfig, RolloutConfig
from gymrl.gym.service import GymService
from gymrl.rollout.engine import RolloutEngine
from gymrl.rollout.fleet import Fleet

TICK_S = 0.001
TARGET_MS = 50.0


class Size(msgspec.Struct, frozen=True):
    """How much is measured: rows at once, their shape, and how often."""

    rows: int = 8
    rounds: int = 3
    shape: Shape = Shape(prompt=2048, sampled=14336, turns=8)


TINY = Size(rows=2, rounds=1, shape=Shape(prompt=16, sampled=16, turns=2))


class LoopWatch:
    """Notes how many milliseconds late a task wakes up, again and again, while it is started."""

    def __init__(self) -> None:
        self._tasks = OwnedTasks("watch")
        self._late: list[float] = []

    def start(self) -> None:
        """Begin, and forget what was noted."""
        self._late.clear()
        self._tasks = OwnedTasks("watch")
        _ = self._tasks.start(self._watch(), "ticks")

    async def stop(self) -> list[float]:
        """End, and give what was noted: one lateness at least."""
        while not self._late:  # noqa: ASYNC110 - it ticks all the time
            await anyio.sleep(TICK_S)
        await self._tasks.close()
        return list(self._late)

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await anyio.sleep(TICK_S)
            self._late.append(1000 * (time.perf_counter() - before - TICK_S))


class WatchedGymService(GymService):
    """A Gym worker whose event loop is watched."""

    async def start_watch(self) -> None:
        """Begin."""
        self._watch = LoopWatch()
        self._watch.start()

    async def stop_watch(self) -> list[float]:
        """End, and give the lateness of each tick in milliseconds."""
        return await self._watch.stop()


async def measure(size: Size, tokenizer: str) -> list[Comparison]:
    """Lateness in both processes, beside that of a loop which has nothing to do."""
    async with spawn(StubAgent, options=SpawnOptions(name="agent"), shape=size.shape) as agent:
        config = RolloutConfig(
            gym=GymConfig(registry_url=await agent.call("registry_url"), tokenizer=tokenizer)
        )
        fleet = Fleet(config, gym=WatchedGymService)
        async with RolloutEngine(config, fleet=fleet) as engine:
            alone = await _late_alone()
            await _roll_out(engine, size)  # connections and caches
            late: dict[str, list[float]] = {"driver": [], "worker": []}
            for _ in range(size.rounds):
                watch = LoopWatch()
                watch.start()
                await fleet.instances[0].call("start_watch")
                await _roll_out(engine, size)
                late["worker"] += await fleet.instances[0].call("stop_watch")
                late["driver"] += await watch.stop()
    return [_comparison(where, values, alone, size) for where, values in late.items()]


async def _late_alone() -> list[float]:
    watch = LoopWatch()
    watch.start()
    await anyio.sleep(0.5)
    return await watch.stop()


async def _roll_out(engine: RolloutEngine, size: Size) -> None:
    tokens = 0
    async for group in engine.stream([dataset_row()], num_generations=size.rows):
        tokens += sum(trajectory.num_tokens for trajectory in group.trajectories)
    if tokens != size.rows * size.shape.tokens:
        raise RuntimeError(f"{tokens} of {size.rows * size.shape.tokens} tokens came back")


def _comparison(where: str, late: list[float], alone: list[float], size: Size) -> Comparison:
    thousands = size.shape.tokens / 1024
    return Comparison(
        name=f"lateness of the {where}'s loop beside {size.rows} rows of {thousands:.3g}k tokens",
        unit="ms",
        sides={
            "p50": _quantile(late, 0.5),
            "p99": _quantile(late, 0.99),
            "most": max(late),
            "p99 of an idle loop": _quantile(alone, 0.99),
        },
        ratio="p99",
        value=_quantile(late, 0.99),
        target=TARGET_MS,
        at_least=False,
    )


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]
