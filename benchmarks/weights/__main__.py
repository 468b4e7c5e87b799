"""New weights for a running vLLM engine: from the trainer's tensors until they serve, by each road.

::

    python -m benchmarks.weights --json weights.json

Takes about a minute with SmolLM2 (135 million parameters, float32); ``--quick`` takes a tiny model.
"""

from __future__ import annotations

import logging
import sys
import tempfile

import anyio

from benchmarks.comparison import Clock, Report, options, publish
from benchmarks.weights import roads
from gymrl.generation.models import resolve_model
from gymrl.testing import build_tiny_model


async def run(quick: bool) -> Report:
    """Every road."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        model = str(build_tiny_model(directory)) if quick else resolve_model("smollm2")
        comparisons = await roads.measure(model, rounds=1 if quick else 5)
    return clock.report("weights", comparisons, {}, quick)


def main() -> int:
    """Measure and print."""
    chosen = options(__doc__.splitlines()[0])
    logging.basicConfig(level=logging.ERROR)
    return publish(anyio.run(run, chosen.quick), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
