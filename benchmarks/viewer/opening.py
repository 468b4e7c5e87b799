"""``gymrl view`` on a large file: when its first page is there, when it is indexed, what that takes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.comparison import Comparison
from benchmarks.viewer.workload import write_file


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        file: Bytes of the file.
        plain: Bytes of it that ``json.loads`` decodes.
        rounds: How often the file is opened.
    """

    file: int
    plain: int
    rounds: int


FULL = Size(1_000_000_000, 100_000_000, 3)
TINY = Size(3_000_000, 1_000_000, 1)


class Opening(msgspec.Struct, frozen=True):
    """One opening of the file, in a process of its own.

    Attributes:
        first_page_s: From the start of the process to the first list of groups.
        page_s: Of that, from the request on.
        indexed_s: Until the last row is in the index.
        slowest_s: The slowest list of groups while the index grew.
        peak_bytes: The most memory that the process held.
    """

    first_page_s: float
    page_s: float
    indexed_s: float
    slowest_s: float
    peak_bytes: int
    rows: int


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return msgspec.json.decode(response.read())


def open_file(path: Path) -> Opening:
    """Open the file as a user does, and ask as the page does."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "gymrl", "view", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            base = process.stdout.readline().strip()
            asked = time.perf_counter()
            _get(f"{base}api/groups?limit=50")
            first = time.perf_counter()
            slowest = first - asked
            while (status := _get(f"{base}api/status"))["progress"]["state"] == "indexing":
                here = time.perf_counter()
                _get(f"{base}api/groups?limit=50&sort=-std")
                slowest = max(slowest, time.perf_counter() - here)
                time.sleep(0.1)
            peak = _peak_bytes(process.pid)
        finally:
            process.terminate()
            process.wait()
    return Opening(
        first_page_s=first - began,
        page_s=first - asked,
        indexed_s=status["progress"]["seconds"],
        slowest_s=slowest,
        peak_bytes=peak,
        rows=status["rows"],
    )


def _peak_bytes(pid: int) -> int:
    """The most memory that a process has held so far, as the kernel counts it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel says nothing of the memory of process {pid}")


def plain_bytes_per_s(path: Path, size: int) -> float:
    """What ``json.loads`` alone decodes of the same lines, in bytes a second."""
    seconds = 0.0
    done = 0
    with path.open("rb") as file:
        for line in file:
            began = time.perf_counter()
            json.loads(line)
            seconds += time.perf_counter() - began
            done += len(line)
            if done >= size:
                break
    return done / seconds


def measure(size: Size, openings: list[Opening] | None = None) -> list[Comparison]:
    """All questions; each opening is added to `openings`, where given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        rows = write_file(path, size.file)
        found: list[Opening] = []
        plain: list[float] = []
        for _ in range(size.rounds):
            plain.append(plain_bytes_per_s(path, size.plain))
            found.append(open_file(path))
        file_bytes = path.stat().st_size
    if any(one.rows != rows for one in found):
        raise SystemExit(f"the index has {[one.rows for one in found]} rows, the file {rows}")
    if openings is not None:
        openings += found
    first = statistics.median(one.first_page_s for one in found)
    speed = statistics.median(file_bytes / one.indexed_s for one in found)
    slowest = statistics.median(one.slowest_s for one in found)
    peak = max(one.peak_bytes for one in found)
    return [
        Comparison(
            name=f"a file of {file_bytes / 1e9:.3g} GB",
            unit="s",
            sides={"first page": first, "slowest page while it is read": slowest},
            ratio="seconds from the command to the first page",
            value=first,
            target=5.0,
            at_least=False,
            note="the file is in the page cache; pages are asked for all the while",
        ),
        Comparison(
            name="indexing",
            unit="MB/s",
            sides={"gymrl": speed / 1e6, "json.loads": statistics.median(plain) / 1e6},
            ratio="gymrl / json.loads",
            value=statistics.median(
                file_bytes / one.indexed_s / its for one, its in zip(found, plain, strict=True)
            ),
            target=4.0,
            at_least=True,
        ),
        Comparison(
            name="memory",
            unit="MB",
            sides={"peak": peak / 1e6},
            ratio="peak, all of the process",
            value=peak / 1e6,
            target=400.0,
            at_least=False,
        ),
    ]
