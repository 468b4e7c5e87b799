"""Calls, streams and arrays through actors, beside a raw floor, Ray and xoscar.

::

    python -m benchmarks.actors --json results.json
"""

from __future__ import annotations

import sys

import uvloop

from benchmarks.actors import arrays, calls, streams
from benchmarks.comparison import Clock, Report, options, publish
from benchmarks.peers.both import peers


async def run(quick: bool) -> Report:
    """Every question, with both peers beside."""
    clock = Clock()
    async with peers("ray_peer.py", "xoscar_peer.py") as (ray, xoscar):
        for peer in (ray, xoscar):
            if peer is not None:
                await peer.ask("prepare")
        comparisons = [
            *await calls.measure(calls.TINY if quick else calls.Size(), ray, xoscar),
            *await streams.measure(streams.TINY if quick else streams.Size(), ray, xoscar),
            *await arrays.measure(arrays.TINY if quick else arrays.Size(), ray, xoscar),
        ]
    return clock.report("actors", comparisons, {}, quick)


def main() -> int:
    """Measure and print."""
    chosen = options(__doc__.splitlines()[0])
    return publish(uvloop.run(run(chosen.quick)), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
