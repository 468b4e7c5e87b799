"""Calls: one at a time beside a raw echo, and thousands at once."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from benchmarks.actors.floor import RawEcho
from benchmarks.actors.subject import Bench
from benchmarks.comparison import Comparison, Measure, Turns, take_turns
from gymrl.actors import ActorHandle, spawn

if TYPE_CHECKING:
    from benchmarks.peers.process import Peer


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        calls: One at a time, in a turn.
        peer_calls: The same for peers, which are slower.
        width: Calls at once.
        rounds: Turns.
        short_rounds: Turns beside the raw echo.
    """

    calls: int = 1000
    peer_calls: int = 300
    width: int = 4096
    rounds: int = 5
    short_rounds: int = 31


TINY = Size(calls=20, peer_calls=5, width=20, rounds=1, short_rounds=1)


async def measure(size: Size, ray: Peer | None, xoscar: Peer | None) -> list[Comparison]:
    """Both questions."""
    async with RawEcho() as echo, spawn(Bench) as bench:
        return [
            *await _sequential(size, echo, bench, ray, xoscar),
            *await _burst(size, bench, ray, xoscar),
        ]


async def _sequential(
    size: Size, echo: RawEcho, bench: ActorHandle, ray: Peer | None, xoscar: Peer | None
) -> list[Comparison]:
    async def ours() -> float:
        began = time.perf_counter()
        for number in range(size.calls):
            await bench.call("add", "add", number)
        return (time.perf_counter() - began) / size.calls

    others: dict[str, Measure] = {}
    if xoscar is not None:
        others["xoscar"] = partial(xoscar.seconds, "sequential", calls=size.peer_calls)
    if ray is not None:
        others["Ray"] = partial(ray.seconds, "sequential", calls=size.peer_calls)
    # What takes microseconds is disturbed by anything: many short turns, with no peer between.
    floor = await take_turns(
        ours, {"raw echo": partial(echo.sequential, size.calls)}, size.short_rounds
    )
    peers = await take_turns(ours, others, size.rounds)

    def comparison(turns: Turns, other: str, target: float, note: str = "") -> Comparison:
        best = turns.best_faster(other)
        return Comparison(
            name="sequential calls",
            unit="µs a call",
            sides={name: 1e6 * value for name, value in turns.medians().items()},
            ratio=f"gymrl / {other}",
            value=turns.times_longer(other),
            best=None if best is None else 1 / best,
            target=target,
            at_least=False,
            note=note,
        )

    note = "Ray in its fastest form: an actor of plain methods, and ray.get"
    return [comparison(floor, "raw echo", 3.0), comparison(peers, "Ray", 0.2, note)]


async def _burst(
    size: Size, bench: ActorHandle, ray: Peer | None, xoscar: Peer | None
) -> list[Comparison]:
    async def ours() -> float:
        began = time.perf_counter()
        await asyncio.gather(*[bench.call("noop") for _ in range(size.width)])  # noqa: TID251  # as the peers do
        return time.perf_counter() - began

    others: dict[str, Measure] = {}
    if xoscar is not None:
        others["xoscar"] = partial(xoscar.seconds, "burst", calls=size.width)
    if ray is not None:
        for name, actor, wait in RAY_FORMS:
            others[name] = partial(ray.seconds, "burst", calls=size.width, actor=actor, wait=wait)
    turns = await take_turns(ours, others, size.rounds)
    shown = turns.rates(size.width)

    def comparison(other: str, target: float, note: str = "") -> Comparison:
        return Comparison(
            name=f"{size.width:,} calls at once",
            unit="calls/s",
            sides=shown,
            ratio=f"gymrl / {other}",
            value=turns.times_faster(other),
            best=turns.best_faster(other),
            target=target,
            at_least=True,
            note=note,
        )

    note = "the actor runs its calls concurrently on every side of this ratio"
    return [comparison(fastest(shown, OVERLAPPING), 20.0, note), comparison("xoscar", 3.0)]


OVERLAPPING = ("Ray async, get", "Ray async, await")
"""Ray's actors whose calls overlap, as gymrl's do."""

RAY_FORMS = (
    (OVERLAPPING[0], "concurrent", "get"),
    (OVERLAPPING[1], "concurrent", "await"),
    ("Ray plain, get", "plain", "get"),
)


def fastest(shown: dict[str, float], names: tuple[str, ...]) -> str:
    """The side with the highest rate; the first where none was measured."""
    return max(names, key=lambda name: shown.get(name, 0.0))
