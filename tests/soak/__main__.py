"""``make soak``: minutes of faults. Prints its figures as one line of JSON; fails when any is off."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import sys
import time
from typing import Any

import anyio
import psutil

from gymrl.actors import spawn
from tests.integration.actors.fuzzing import Fuzzer
from tests.integration.actors.watching import Open, what_is_left, what_is_open
from tests.soak import spawns
from tests.soak.rows import RowSoak

MARK = "GYMRL_SOAK"
ROOM_MIB = 96


def processes_left() -> int:
    """Processes of this run that live, wherever they are by now; this one apart."""
    mark = os.environ[MARK]
    found = 0
    for process in psutil.process_iter():
        try:
            found += process.pid != os.getpid() and process.environ().get(MARK) == mark
        except psutil.Error:
            continue
    return found


async def settled(before: Open) -> dict[str, int]:
    """What is open now, or runs anywhere, and did not before."""
    left = await what_is_left(before)
    with anyio.move_on_after(30):
        while processes_left():  # noqa: ASYNC110 - other processes send no events
            await anyio.sleep(0.05)
    if orphans := processes_left():
        left["processes"] = orphans
    return left


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    async with spawn(spawns.Small) as warm:
        await warm.call("double", 1)
    before = what_is_open()
    figures: dict[str, Any] = {"rows": await RowSoak(options.rows, options.seed).run()}
    figures["left_after_rows"] = await settled(before)
    figures["spawns"] = await spawns.run(options.spawns, options.spawns)
    figures["left_after_spawns"] = await settled(before)
    report = await Fuzzer(options.seed).run(options.fuzz, options.fuzz_seconds)
    figures["fuzz"] = {
        "cases": report.cases,
        "outcomes": report.outcomes,
        "slowest_s": round(report.slowest_s, 3),
        "traced_peak_kib": report.traced_peak_bytes >> 10,
        "resident_growth_mib": report.rss_growth_bytes >> 20,
    }
    return figures


def faults(figures: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """What is wrong with the figures."""
    rows, fuzz = figures["rows"], figures["fuzz"]
    checks = {
        "every row accounted for once": rows["accounted_once"] == options.rows,
        "every row ended as it should": not rows["wrong"],
        "few innocent rows condemned": rows["innocent_poisoned"] <= 1 + options.rows // 20_000,
        "nothing left after the rows": not figures["left_after_rows"],
        "nothing left after the spawns": not figures["left_after_spawns"],
        "memory level over the rows": _is_level(rows["resident_mib"]),
        "memory level over the spawns": _is_level(figures["spawns"]["resident_mib"]),
        "every fuzz case soon": fuzz["slowest_s"] < 10,
        "every fuzz case small": fuzz["traced_peak_kib"] < 16 << 10,
    }
    return [name for name, holds in checks.items() if not holds]


def _is_level(resident_mib: list[int]) -> bool:
    return resident_mib[-1] - resident_mib[0] < ROOM_MIB


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--spawns", type=int, default=1000, help="of each kind")
    parser.add_argument("--fuzz", type=int, default=300_000, help="cases")
    parser.add_argument("--fuzz-seconds", type=float, default=300.0)
    parser.add_argument("--seconds", type=float, default=2400.0, help="give up after so long")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # faults by the thousand are the point
    os.environ[MARK] = secrets.token_hex(8)
    began = time.monotonic()

    async def bounded() -> dict[str, Any]:
        with anyio.fail_after(options.seconds):
            return await soak(options)

    figures = asyncio.run(bounded())
    figures["seconds"] = round(time.monotonic() - began, 1)
    figures["seed"] = options.seed
    figures["failed"] = faults(figures, options)
    sys.stdout.write(json.dumps(figures) + "\n")
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
