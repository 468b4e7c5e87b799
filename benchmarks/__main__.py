"""Run every benchmark package, one after the other; results as JSON in ``benchmarks/results``.

::

    python -m benchmarks [--quick] [NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.comparison import Report, table

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def packages() -> list[str]:
    """The names of all packages that can be run."""
    return sorted(path.parent.name for path in FOLDER.glob("*/__main__.py"))


def takes_quick(name: str) -> bool:
    """Whether a package can be run in tiny sizes."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    answer = subprocess.run(command, cwd=FOLDER.parent, check=False, capture_output=True, text=True)
    return "--quick" in answer.stdout


def run(name: str, quick: bool) -> int:
    """Run one package in an interpreter of its own; its exit code, 1 where a target is missed."""
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(RESULTS / f"{name}.json")]
    if quick:
        command.append("--quick")
    began = time.perf_counter()
    code = subprocess.run(command, cwd=FOLDER.parent, check=False).returncode
    print(f"== {name}: {time.perf_counter() - began:.0f} s, exit code {code}", flush=True)
    return code


def summary(names: list[str]) -> str:
    """The comparisons of all packages that wrote a report of the common form."""
    comparisons = []
    for name in names:
        try:
            content = (RESULTS / f"{name}.json").read_bytes()
            comparisons += msgspec.json.decode(content, type=Report).comparisons
        except (OSError, msgspec.DecodeError):
            continue  # none was written, or in a form of its own
    return table(comparisons)


def main() -> int:
    """Run what was asked for; 1 where a target was missed or a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is judged")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(packages()))
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.names) - set(packages()))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(packages())}")
    names = chosen.names or packages()
    RESULTS.mkdir(exist_ok=True)
    codes = [run(name, chosen.quick and takes_quick(name)) for name in names]
    print(summary(names))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
