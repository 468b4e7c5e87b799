"""The stream of a call's rows, without HTTP."""

from __future__ import annotations

import json

import anyio
import anyio.lowlevel

from gymrl.gym.episode import EpisodeOptions
from gymrl.gym.registry import AGENTS, RouteTable
from gymrl.gym.rollouts import RowServer, stream_rows
from gymrl.testing.gym_server import gym_answer
from gymrl.types import Row, Trajectory


class AllAtOnce:
    """Answers every row as soon as all have asked."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._all_here = anyio.Event()

    async def run(self, url: str, row: Row, agent: str) -> bytes:
        self._left -= 1
        if not self._left:
            self._all_here.set()
        await self._all_here.wait()
        return json.dumps(gym_answer([([1, 2], [3])])).encode()


async def test_results_that_are_there_are_handed_on_without_a_turn_of_the_loop_for_each():
    rows = [
        Row(
            index=index,
            task_index=index,
            rollout_index=0,
            route="math",
            rollout_id=f"r{index}",
            body=b"{}",
        )
        for index in range(100)
    ]
    block = {"simple": {"entrypoint": "app.py", "host": "127.0.0.1", "port": 1}}
    table = RouteTable({"math": {AGENTS: block}})
    server = RowServer(AllAtOnce(len(rows)), table, EpisodeOptions(), None)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with anyio.create_task_group() as group:
        group.start_soon(count_turns)
        stream = stream_rows(server, rows, "t")
        first = await anext(stream)
        assert isinstance(first.outcome, Trajectory)
        turns = 0
        rest = [result.index async for result in stream]
        group.cancel_scope.cancel()
    assert sorted([first.index, *rest]) == list(range(100))
    assert turns < 20
