"""Streams of rows: two messages of 2,048 token ids, log-probabilities and 6 kB of text."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from benchmarks.actors.calls import OVERLAPPING, RAY_FORMS, fastest
from benchmarks.actors.subject import Bench
from benchmarks.comparison import Comparison, Measure, Turns, take_turns
from gymrl.actors import ActorHandle, spawn

if TYPE_CHECKING:
    from benchmarks.peers.process import Peer


class Size(msgspec.Struct, frozen=True):
    """How much is measured: rows of a stream, and turns."""

    rows: int = 1000
    rounds: int = 5


TINY = Size(rows=5, rounds=1)


async def measure(size: Size, ray: Peer | None, xoscar: Peer | None) -> list[Comparison]:
    """Rows as arrays, and as lists of Python numbers."""
    async with spawn(Bench) as bench:
        arrays = await _turns(size, bench, ray, xoscar, "arrays")
        lists = await _turns(size, bench, ray, xoscar, "lists")
    shown = arrays.rates(size.rows)
    beside = ", ".join(f"{side} {rate:,.0f}" for side, rate in lists.rates(size.rows).items())

    def comparison(other: str, target: float, note: str = "") -> Comparison:
        return Comparison(
            name=f"a stream of {size.rows:,} rows",
            unit="rows/s",
            sides=shown,
            ratio=f"gymrl / {other}",
            value=arrays.times_faster(other),
            best=arrays.best_faster(other),
            target=target,
            at_least=True,
            note=note,
        )

    note = f"as lists of Python numbers instead of arrays, rows/s: {beside}"
    return [comparison(fastest(shown, OVERLAPPING), 8.0, note), comparison("xoscar", 2.5)]


async def _turns(
    size: Size, bench: ActorHandle, ray: Peer | None, xoscar: Peer | None, form: str
) -> Turns:
    method = "rows" if form == "arrays" else "list_rows"

    async def ours() -> float:
        seen = 0
        began = time.perf_counter()
        async for row in bench.stream(method, size.rows):
            seen += len(row) == 2
        if seen != size.rows:
            raise RuntimeError(f"{seen} of {size.rows} rows came")
        return time.perf_counter() - began

    others: dict[str, Measure] = {}
    if xoscar is not None:
        others["xoscar"] = partial(xoscar.seconds, "rows", count=size.rows, form=form)
    if ray is not None:
        for name, actor, wait in RAY_FORMS:
            others[name] = partial(
                ray.seconds, "rows", count=size.rows, actor=actor, wait=wait, form=form
            )
    rounds = size.rounds if form == "arrays" else min(size.rounds, 2)
    return await take_turns(ours, others, rounds)
