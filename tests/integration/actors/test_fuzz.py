"""A share of the fuzzing that `make soak` does in full."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.actors.fuzzing import Fuzzer

# What the machine lends while several hundred thousand cases run; a case may hold a frame or two.
CASE_S = 5.0
CASE_BYTES = 16 << 20
RUN_BYTES = 200 << 20


@pytest.mark.parametrize("seed", [1, 2])
async def test_broken_frames_end_typed_soon_and_in_little_memory(seed, caplog):
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    caplog.set_level("CRITICAL")
    report = await Fuzzer(seed).run(cases=500_000, seconds=8)
    assert report.cases > 500
    assert report.slowest_s < CASE_S
    assert report.traced_peak_bytes < CASE_BYTES
    assert report.rss_growth_bytes < RUN_BYTES
    ends = {name.split(": ")[1] for name in report.outcomes}
    assert {"whole", "TornFrameError", "ProtocolError", "FrameTooLargeError"} <= ends
    assert ends <= {
        "whole",
        "NoneType",
        "TornFrameError",
        "ProtocolError",
        "FrameTooLargeError",
        "ValidationError",
    }
    assert not unheard
