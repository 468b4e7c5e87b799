"""How long it takes until two workers that hold a tokenizer are ready."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from benchmarks.comparison import Comparison, Measure, take_turns
from benchmarks.peers.process import Peer, installed
from gymrl.actors import spawn
from gymrl.concurrency import gather_bounded
from gymrl.config import GymConfig
from gymrl.gym.service import GymService

if TYPE_CHECKING:
    from pathlib import Path


class Size(msgspec.Struct, frozen=True):
    """How much is measured: workers, and turns."""

    workers: int = 2
    rounds: int = 5


TINY = Size(workers=1, rounds=1)


async def measure(size: Size, tokenizer: Path, with_ray: bool) -> list[Comparison]:
    """Seconds from nothing to ready, beside ``ray.init`` and as many actors."""
    config = GymConfig(registry_url="http://127.0.0.1:9", tokenizer=str(tokenizer))

    async def ours() -> float:
        async with contextlib.AsyncExitStack() as stack:

            async def start(_: int) -> None:
                await stack.enter_async_context(spawn(GymService, config=config))

            began = time.perf_counter()
            await gather_bounded(start, range(size.workers))
            return time.perf_counter() - began

    async def theirs() -> float:
        async with Peer("ray_peer.py") as ray:
            return await ray.seconds("start", tokenizer=str(tokenizer), workers=size.workers)

    others: dict[str, Measure] = {"Ray": theirs} if with_ray and installed() else {}
    turns = await take_turns(ours, others, size.rounds)
    ratio, best = turns.times_longer("Ray"), turns.best_faster("Ray")
    return [
        Comparison(
            name=f"start: {size.workers} workers ready, tokenizer installed",
            unit="s",
            sides=turns.medians(),
            ratio="gymrl / Ray",
            value=ratio,
            best=None if best is None else 1 / best,
            target=1 / 3,
            at_least=False,
            note="Ray: ray.init and its actors, without importing ray",
        )
    ]
