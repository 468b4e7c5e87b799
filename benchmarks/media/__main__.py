"""What is heavy in a rollout: images of a group, and routes of experts, across a link.

::

    python -m benchmarks.media --json results.json
"""

from __future__ import annotations

import sys

import uvloop

from benchmarks.comparison import Clock, Report, options, publish
from benchmarks.media import images, routes


async def run(quick: bool) -> Report:
    """Every question."""
    clock = Clock()
    comparisons = [
        *await images.measure(images.TINY if quick else images.Size()),
        *await routes.measure(routes.TINY if quick else routes.Size()),
    ]
    return clock.report("media", comparisons, {}, quick)


def main() -> int:
    """Measure and print."""
    chosen = options(__doc__.splitlines()[0])
    return publish(uvloop.run(run(chosen.quick)), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
