"""Generation: the server beside the bare engine, and the two roads of training tokens.

::

    python -m benchmarks.generation --json generation.json

Takes about two minutes; ``--quick`` takes tiny sizes and leaves SmolLM2 out.
"""

from __future__ import annotations

import logging
import sys
import tempfile

import anyio

from benchmarks.comparison import Clock, Comparison, Report, options, publish
from benchmarks.generation import front, next_prompt, roads, throughput
from benchmarks.generation.throughput import Load
from gymrl.testing import build_tiny_model


async def run(quick: bool) -> Report:
    """Measure everything."""
    clock = Clock()
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory() as directory:
        tiny = Load(
            name="tiny model",
            model=str(build_tiny_model(directory)),
            num_prompts=8 if quick else 64,
            num_tokens=8 if quick else 128,
            batch_size=16,
            rounds=1 if quick else 4,
            target=0.85,
        )
        comparisons += await throughput.measure(tiny)
    if not quick:
        smollm2 = Load(
            name="SmolLM2-135M",
            model="smollm2",
            num_prompts=8,
            num_tokens=12,
            batch_size=8,
            rounds=4,
            target=0.95,
        )
        comparisons += await throughput.measure(smollm2)
    comparisons += await front.measure(calls=5 if quick else 50, rounds=1 if quick else 4)
    comparisons += await next_prompt.measure(
        calls=2 if quick else 20,
        rounds=1 if quick else 4,
        sizes=(100,) if quick else (3000, 12000),
    )
    comparisons += await roads.measure(turns=4 if quick else 32, rounds=1 if quick else 3)
    return clock.report("generation", comparisons, {}, quick)


def main() -> int:
    """Measure and print."""
    chosen = options("Generation through the server, and the roads of training tokens")
    logging.basicConfig(level=logging.ERROR)
    return publish(anyio.run(run, chosen.quick), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
