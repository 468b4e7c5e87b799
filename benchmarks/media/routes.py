"""Routes of a long rollout from a worker to the driver, beside copying memory; and on the wire."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from benchmarks.actors.floor import copy_s
from benchmarks.comparison import Comparison, take_turns
from gymrl.actors import Actor, spawn
from gymrl.routed_experts import decode_routes, encode_routes
from gymrl.types import Reward, RowResult, Trajectory, Turn

if TYPE_CHECKING:
    from gymrl.types import RoutesArray

COPYING = "copying memory"
LISTS = "nested lists of JSON"


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        tokens: Of the trajectory.
        layers: With experts.
        experts: A token and layer.
        count: Trajectories in a turn.
        rounds: Turns.
        listed: Tokens of what is read from the wire as lists, too.
    """

    tokens: int = 128 << 10
    layers: int = 48
    experts: int = 8
    count: int = 8
    rounds: int = 5
    listed: int = 2048


TINY = Size(tokens=256, layers=2, experts=2, count=2, rounds=1, listed=64)


class Router(Actor):
    """Gives out one trajectory, over and over, as a worker gives out results."""

    async def setup(self, size: Size) -> None:
        """Make it.

        Args:
            size: Of its routes.
        """
        self._result = _result(size)

    async def give(self) -> RowResult:
        """The result."""
        return self._result


def _routes(size: Size, tokens: int) -> RoutesArray:
    shape = (tokens, size.layers, size.experts)
    return np.random.default_rng(0).integers(0, 128, shape, dtype=np.int8)


def _result(size: Size) -> RowResult:
    trajectory = Trajectory(
        agent="a",
        token_ids=np.ones(size.tokens, np.int32),
        logprobs=np.full(size.tokens, -1, np.float32),
        turns=(Turn(start=0, generation_start=1, end=size.tokens),),
        reward=Reward(1.0),
        routed_experts=_routes(size, size.tokens),
    )
    return RowResult(index=0, agent="a", outcome=trajectory)


async def measure(size: Size) -> list[Comparison]:
    """The link, and the wire."""
    return [await _link(size), await _wire(size)]


async def _link(size: Size) -> Comparison:
    nbytes = size.tokens * size.layers * size.experts
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    expected = _routes(size, size.tokens)

    async with spawn(Router, size=size) as router:
        first = await router.call("give")
        if not np.array_equal(first.outcome.routed_experts, expected):
            raise RuntimeError("routes came back changed")

        async def received() -> float:
            began = time.perf_counter()
            for _ in range(size.count):
                await router.call("give")
            return time.perf_counter() - began

        async def copied() -> float:
            return copy_s(source, target, size.count)

        turns = await take_turns(received, {COPYING: copied}, size.rounds)
    return Comparison(
        name=f"routes of {size.tokens:,} tokens x {size.layers} layers x {size.experts}",
        unit="GB/s",
        sides=turns.rates(nbytes * size.count / 1e9),
        ratio=f"gymrl / {COPYING}",
        value=turns.times_faster(COPYING),
        best=turns.best_faster(COPYING),
        target=0.5,
        at_least=True,
        note=f"{nbytes / 1e6:.0f} MB a trajectory, tokens and log-probabilities with it",
    )


async def _wire(size: Size) -> Comparison:
    routes = _routes(size, size.listed)
    envelope, lists = encode_routes(routes), json.dumps(routes.tolist())

    async def read() -> float:
        began = time.perf_counter()
        decode_routes(envelope)
        return time.perf_counter() - began

    async def parsed() -> float:
        began = time.perf_counter()
        np.array(json.loads(lists), dtype=np.int8)
        return time.perf_counter() - began

    turns = await take_turns(read, {LISTS: parsed}, size.rounds)
    return Comparison(
        name=f"routes of {size.listed:,} tokens read from the wire",
        unit="GB/s",
        sides=turns.rates(routes.nbytes / 1e9),
        ratio=f"gymrl's envelope / {LISTS}",
        value=turns.times_faster(LISTS),
        best=turns.best_faster(LISTS),
        target=10.0,
        at_least=True,
        note=f"{len(envelope) / routes.nbytes:.2f} bytes a number, {len(lists) / routes.nbytes:.2f} "
        "as lists",
    )
