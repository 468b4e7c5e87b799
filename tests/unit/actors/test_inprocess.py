"""The in-process twin: a worker's rules in the caller's own loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt  # read at run time, off the annotations
import pytest

from gymrl.actors import Actor, SpawnOptions, spawn
from gymrl.errors import ActorDiedError, ActorStartError, EncodeError, RemoteError


class Keeper(Actor):
    async def setup(self, items: list[int]) -> None:
        self.items = items
        self.closed: list[str] = []

    async def keep(self, item: list[int]) -> list[list[int]]:
        self.kept = [item]
        return self.kept

    async def double(self, array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return array * 2

    async def frames(self) -> list[str]:
        frame, names = sys._getframe(), []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return names

    async def exit(self) -> None:
        raise SystemExit(3)

    async def numbers(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number

    async def set(self) -> Any:
        return {1, 2}

    async def close(self) -> None:
        self.closed.append("closed")


def keeper(**options: Any):
    return spawn(Keeper, in_process=True, items=[1], options=SpawnOptions(**options))


async def test_arguments_and_results_are_copies_as_across_processes():
    async with keeper() as handle:
        item = [1]
        result = await handle.call("keep", item)
        item.append(2)
        result[0].append(3)
        assert handle._actor.kept == [[1]]
        array = np.arange(3, dtype=np.int32)
        doubled = await handle.call("double", array)
        assert not doubled.flags.writeable
        assert await handle.call("set") in ([1, 2], [2, 1])  # as msgpack would have it


async def test_a_stack_trace_reaches_from_the_method_to_the_caller():
    async def the_caller(handle):
        return await handle.call("frames")

    async with keeper() as handle:
        names = await the_caller(handle)
    assert names[0] == "frames"
    assert "the_caller" in names


async def test_an_exit_of_the_callee_does_not_end_the_caller():
    async with keeper() as handle:
        with pytest.raises(RemoteError) as caught:
            await handle.call("exit")
        assert caught.value.remote_type == "SystemExit"
        assert isinstance(caught.value.__cause__, SystemExit)


async def test_close_runs_once():
    async with keeper() as handle:
        actor = handle._actor
    await handle.close()
    assert actor.closed == ["closed"]


async def test_kill_does_not_run_close():
    async with keeper() as handle:
        actor = handle._actor
        handle.kill()
        with pytest.raises(ActorDiedError):
            await handle.call("set")
    assert actor.closed == []


async def test_two_readers_of_one_stream_are_refused():
    class Slow(Actor):
        async def never(self) -> AsyncIterator[int]:
            await asyncio.sleep(60)
            yield 1

    async with spawn(Slow, in_process=True) as slow, slow.stream("never") as stream:
        async with anyio.create_task_group() as group:

            async def read():
                await anext(stream)

            group.start_soon(read)
            await anyio.sleep(0.01)
            with pytest.raises(RuntimeError, match="two tasks"):
                await anext(stream)
            group.cancel_scope.cancel()


async def test_no_task_is_left_behind_by_streams():
    async with keeper() as handle:
        assert [n async for n in handle.stream("numbers", 100)] == list(range(100))
        async for _ in handle.stream("numbers", 1000):
            break
        with anyio.fail_after(30):
            while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - the streams' own tasks
                await anyio.sleep(0.001)


async def test_a_call_before_the_set_up_and_a_broken_set_up_are_refused():
    class Broken(Actor):
        async def setup(self) -> None:
            raise KeyError("broken")

    with pytest.raises(ActorStartError, match="KeyError") as caught:
        async with spawn(Broken, in_process=True):
            pass
    assert isinstance(caught.value.__cause__, KeyError)


async def test_an_argument_that_would_not_cross_is_refused_here_too():
    async with keeper() as handle:
        with pytest.raises(EncodeError, match=r"^Keeper.keep\(\).item\[0\] cannot travel"):
            await handle.call("keep", [object()])
