"""Opening a file of 1 GB with ``gymrl view``.

::

    python -m benchmarks.viewer --json results.json
"""

from __future__ import annotations

import sys

import msgspec

from benchmarks.comparison import Clock, options, publish
from benchmarks.viewer import opening


def main() -> int:
    """Run it; 1 where a target was missed."""
    assert __doc__ is not None
    chosen = options(__doc__.splitlines()[0])
    clock = Clock()
    openings: list[opening.Opening] = []
    comparisons = opening.measure(opening.TINY if chosen.quick else opening.FULL, openings)
    details = {"openings": [msgspec.structs.asdict(one) for one in openings]}
    return publish(clock.report("viewer", comparisons, details, chosen.quick), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
