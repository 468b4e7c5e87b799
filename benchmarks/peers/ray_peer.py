"""Ray doing the same work. Runs in ``.venv-bench``; asked by :mod:`benchmarks.peers.process`.

Each question takes the form of Ray's interface that is said in it, so that the fastest can be chosen
by measuring. Ray's dashboard and its forwarding of logs are off.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from serving import private_output, serve
from work import Roller, make_row

OUTPUT = private_output()

import numpy as np  # noqa: E402  # nothing may print before the output is private
import ray  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

WIDTH = 4096


@ray.remote(num_cpus=0)
class Plain:
    """An actor that does one thing at a time."""

    def __init__(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def noop(self) -> None:
        """Do nothing."""

    def add(self, a: str, b: int) -> list[int]:
        return [b]

    def rows(self, count: int, form: str) -> Iterator[list[dict[str, Any]]]:
        row = make_row(form)
        for _ in range(count):
            yield row

    def take(self, array: np.ndarray) -> int:
        return int(array[-1])


@ray.remote(num_cpus=0, max_concurrency=WIDTH)
class Concurrent:
    """An actor whose calls overlap, as gymrl's do."""

    def __init__(self, url: str = "", tokenizer: str = "") -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._roller = Roller(url)
        self._tokenizer = Tokenizer.from_file(tokenizer) if tokenizer else None

    async def noop(self) -> None:
        """Do nothing."""

    async def rows(self, count: int, form: str) -> AsyncIterator[list[dict[str, Any]]]:
        row = make_row(form)
        for _ in range(count):
            yield row

    async def run_rollouts(
        self, bodies: list[bytes], tokenizer: Tokenizer | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        for body in bodies:
            yield await self._roller.roll_out(body, tokenizer or self._tokenizer)

    async def roll_out_all(
        self, bodies: list[bytes], tokenizer: Tokenizer | None = None
    ) -> list[dict[str, Any]]:
        return [await self._roller.roll_out(body, tokenizer or self._tokenizer) for body in bodies]


class Actors:
    """The actors in use."""

    plain: Any = None
    concurrent: Any = None
    gym: Any = None


def _init() -> None:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=1 << 30,
        configure_logging=False,
    )


async def start(tokenizer: str, workers: int) -> float:
    """Seconds of ``ray.init`` and of actors that hold a tokenizer."""
    began = time.perf_counter()
    _init()
    actors = [Concurrent.remote("", tokenizer) for _ in range(workers)]
    ray.get([actor.noop.remote() for actor in actors])
    return time.perf_counter() - began


async def prepare() -> None:
    """Start Ray and two actors."""
    _init()
    Actors.plain, Actors.concurrent = Plain.remote(), Concurrent.remote()
    ray.get([Actors.plain.noop.remote(), Actors.concurrent.noop.remote()])


async def sequential(calls: int) -> float:
    """Seconds a call, one at a time."""
    add = Actors.plain.add
    began = time.perf_counter()
    for number in range(calls):
        ray.get(add.remote("add", number))
    return (time.perf_counter() - began) / calls


async def burst(calls: int, actor: str, wait: str) -> float:
    """Seconds of so many calls at once."""
    noop = getattr(Actors, actor).noop
    began = time.perf_counter()
    if wait == "get":
        ray.get([noop.remote() for _ in range(calls)])
    else:
        await asyncio.gather(*[noop.remote() for _ in range(calls)])  # noqa: TID251  # what Ray's guide says
    return time.perf_counter() - began


async def rows(count: int, actor: str, wait: str, form: str) -> float:
    """Seconds of a stream of rows."""
    method = getattr(Actors, actor).rows.options(num_returns="streaming")
    seen = 0
    began = time.perf_counter()
    if wait == "get":
        for reference in method.remote(count, form):
            seen += len(ray.get(reference)) == 2
    else:
        async for reference in method.remote(count, form):
            seen += len(await reference) == 2
    if seen != count:
        raise RuntimeError(f"{seen} of {count} rows came")
    return time.perf_counter() - began


async def tensors(size: int, count: int) -> float:
    """Seconds of handing arrays over, one at a time."""
    array = np.ones(size, np.uint8)
    began = time.perf_counter()
    for _ in range(count):
        ray.get(Actors.plain.take.remote(array))
    return time.perf_counter() - began


async def prepare_gym(url: str, tokenizer: str) -> None:
    """Start Ray and an actor that rolls out through `url`."""
    if not ray.is_initialized():
        _init()
    Actors.gym = Concurrent.remote(url, tokenizer)
    ray.get(Actors.gym.noop.remote())


async def admission(calls: int, body: str, form: str, tokenizer: str = "") -> float:
    """Seconds of so many calls of one row at once.

    Args:
        calls: How many.
        body: The row.
        form: ``stream``: as a streaming generator; ``list``: as a call that returns all.
        tokenizer: Given: loaded here and handed to every call.
    """
    encoded = body.encode()
    handed = [Tokenizer.from_file(tokenizer)] if tokenizer else []

    async def streamed() -> int:
        method = Actors.gym.run_rollouts.options(num_returns="streaming")
        tokens = 0
        async for reference in method.remote([encoded], *handed):
            tokens += len((await reference)["turns"][0]["sampled_ids"])
        return tokens

    async def called() -> int:
        results = await Actors.gym.roll_out_all.remote([encoded], *handed)
        return sum(len(result["turns"][0]["sampled_ids"]) for result in results)

    one = streamed if form == "stream" else called
    began = time.perf_counter()
    found = await asyncio.gather(*[one() for _ in range(calls)])  # noqa: TID251  # as above
    if not all(found):
        raise RuntimeError("a row came back without tokens")
    return time.perf_counter() - began


async def main() -> None:
    """Serve, then end what Ray has started."""
    questions = (start, prepare, sequential, burst, rows, tensors, prepare_gym, admission)
    await serve({question.__name__: question for question in questions}, OUTPUT)
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
    sys.exit(0)
