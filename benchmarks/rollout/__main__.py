"""Rollouts through a worker and a whole engine, beside Ray and beside bare loops.

::

    python -m benchmarks.rollout --json results.json
"""

from __future__ import annotations

import sys

import uvloop

from benchmarks.comparison import Clock, Report, options, publish
from benchmarks.peers.both import peers
from benchmarks.rollout import admission, driver, lag, scaling, start
from benchmarks.rollout.large_tokenizer import large_tokenizer


async def run(quick: bool) -> Report:
    """Every question."""
    clock = Clock()
    tokenizer = large_tokenizer()
    comparisons = await start.measure(start.TINY if quick else start.Size(), tokenizer, True)
    async with peers("ray_peer.py") as (ray,):
        size = admission.TINY if quick else admission.Size()
        comparisons += await admission.measure(size, tokenizer, ray)
    comparisons += await driver.measure(driver.TINY if quick else driver.Size())
    comparisons += await lag.measure(lag.TINY if quick else lag.Size(), str(tokenizer))
    comparisons += await scaling.measure(scaling.TINY if quick else scaling.Size())
    return clock.report("rollout", comparisons, {"tokenizer": tokenizer.parent.name}, quick)


def main() -> int:
    """Measure and print."""
    chosen = options(__doc__.splitlines()[0])
    return publish(uvloop.run(run(chosen.quick)), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
