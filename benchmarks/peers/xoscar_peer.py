"""xoscar doing the same work. Runs in ``.venv-bench``; asked by :mod:`benchmarks.peers.process`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvloop
import xoscar
from serving import private_output, serve
from work import make_row
from xoscar.backends.allocate_strategy import ProcessIndex


class Bench(xoscar.Actor):
    """What is measured."""

    async def noop(self) -> None:
        """Do nothing."""

    async def add(self, a: str, b: int) -> list[int]:
        return [b]

    @xoscar.generator
    async def rows(self, count: int, form: str) -> AsyncIterator[list[dict[str, Any]]]:
        row = make_row(form)

        async def items() -> AsyncIterator[list[dict[str, Any]]]:
            for _ in range(count):
                yield row

        return items()

    async def take(self, array: np.ndarray) -> int:
        return int(array[-1])


class Pool:
    """The pool and its actor."""

    pool: Any = None
    bench: Any = None


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def prepare() -> None:
    """Start a pool with one worker process and an actor in it."""
    Pool.pool = await xoscar.create_actor_pool(f"127.0.0.1:{_free_port()}", n_process=1)
    Pool.bench = await xoscar.create_actor(
        Bench,
        address=Pool.pool.external_address,
        uid="bench",
        allocate_strategy=ProcessIndex(1),
    )


async def sequential(calls: int) -> float:
    """Seconds a call, one at a time."""
    began = time.perf_counter()
    for number in range(calls):
        await Pool.bench.add("add", number)
    return (time.perf_counter() - began) / calls


async def burst(calls: int) -> float:
    """Seconds of so many calls at once."""
    began = time.perf_counter()
    await asyncio.gather(*[Pool.bench.noop() for _ in range(calls)])  # noqa: TID251  # what its users write
    return time.perf_counter() - began


async def rows(count: int, form: str) -> float:
    """Seconds of a stream of rows."""
    seen = 0
    began = time.perf_counter()
    async for row in await Pool.bench.rows(count, form):
        seen += len(row) == 2
    if seen != count:
        raise RuntimeError(f"{seen} of {count} rows came")
    return time.perf_counter() - began


async def tensors(size: int, count: int) -> float:
    """Seconds of handing arrays over, one at a time."""
    array = np.ones(size, np.uint8)
    began = time.perf_counter()
    for _ in range(count):
        await Pool.bench.take(array)
    return time.perf_counter() - began


async def main() -> None:
    """Serve, then stop the pool."""
    output = private_output()
    questions = (prepare, sequential, burst, rows, tensors)
    await serve({question.__name__: question for question in questions}, output)
    if Pool.pool is not None:
        await Pool.pool.stop()


if __name__ == "__main__":
    uvloop.run(main())
