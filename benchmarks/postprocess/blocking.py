"""How long a worker's event loop stands still while it reads answers.

The worker is a process of its own, as in a rollout, with a task in it that notes how late it wakes
up; another process answers.
"""

from __future__ import annotations

import json
import os
import time

import anyio
import msgspec

from benchmarks.postprocess.workload import SHAPES, answer, tokenizer_path
from gymrl.actors import Actor, ActorHandle, SpawnOptions, spawn
from gymrl.concurrency import OwnedTasks
from gymrl.config import GymConfig
from gymrl.gym.service import GymService
from gymrl.testing import FakeGymServer
from gymrl.types import Row, Trajectory

ROWS = 12
TICK_S = 0.001
ALONE_S = 1.0
PASSES = 4


class Lateness(msgspec.Struct):
    """Wake-ups of a task that sleeps a millisecond at a time, in milliseconds.

    Attributes:
        late: Beyond the millisecond: the loop was busy, waited for the interpreter, or the
            machine ran something else.
        busy: Of the loop's own thread on the processor, whatever else the machine does.
    """

    late: list[float]
    busy: list[float]


class WatchedService(GymService):
    """The worker, with a task that watches its event loop."""

    async def watch(self) -> None:
        """Begin to note."""
        self._noted = Lateness([], [])
        self._watching = OwnedTasks("watch")
        _ = self._watching.start(self._watch(self._noted), "loop")

    async def noted(self) -> Lateness:
        """Stop, and say what was noted."""
        await self._watching.close()
        return self._noted

    async def _watch(self, noted: Lateness) -> None:
        while True:
            before, used = time.perf_counter(), time.thread_time()
            await anyio.sleep(TICK_S)
            noted.late.append(1000 * (time.perf_counter() - before - TICK_S))
            noted.busy.append(1000 * (time.thread_time() - used))


class AnswerServer(Actor):
    """An agent that gives the same answers again and again."""

    async def setup(self, shape: int) -> None:
        """Make the answers, and listen."""
        bodies = {row: answer(SHAPES[shape], row) for row in range(ROWS)}
        self._server = FakeGymServer(bodies)
        await self._server.start()

    async def url(self) -> str:
        """Where it listens."""
        return self._server.url

    async def close(self) -> None:
        """Stop listening."""
        await self._server.stop()


async def measure(shape: int) -> dict[str, float]:
    """Beside `ROWS` rollouts, in the best of some passes; and beside nothing."""
    patient = SpawnOptions(start_timeout_s=120)
    async with spawn(AnswerServer, options=patient, shape=shape) as server:
        config = GymConfig(registry_url=await server.call("url"), tokenizer=tokenizer_path())
        async with spawn(WatchedService, options=patient, config=config) as worker:
            await worker.call("spin_up", [], "policy")
            await worker.call("watch")
            await anyio.sleep(ALONE_S)
            alone: Lateness = await worker.call("noted")
            rows = [_row(index) for index in range(ROWS)]
            await _roll_out(worker, rows)  # connections and caches
            passes = [await _roll_out(worker, rows) for _ in range(PASSES)]
    # A loop that stands still does so in every pass; what else the machine does only adds.
    seconds, best = min(passes, key=lambda each: max(each[1].late))
    return {
        "rows": ROWS,
        "seconds": seconds,
        "machine_load": os.getloadavg()[0],
        "alone_late_max_ms": max(alone.late),
        "late_p99_ms": sorted(best.late)[int(len(best.late) * 0.99)],
        "late_max_ms": max(best.late),
        "busy_max_ms": max(max(noted.busy) for _, noted in passes),
    }


async def _roll_out(worker: ActorHandle, rows: list[Row]) -> tuple[float, Lateness]:
    await worker.call("watch")
    started = time.perf_counter()
    async for result in worker.stream("run_rollouts", rows):
        if not isinstance(result.outcome, Trajectory):
            raise SystemExit(f"row {result.index}: {result.outcome.message}")
    seconds = time.perf_counter() - started
    noted: Lateness = await worker.call("noted")
    return seconds, noted


def _row(index: int) -> Row:
    body = {"responses_create_params": {"input": "do it"}, "_rowidx": index}
    return Row(
        index=index,
        task_index=index,
        rollout_index=0,
        route="fake_agent",
        rollout_id=f"row-{index}",
        body=json.dumps(body).encode(),
    )
