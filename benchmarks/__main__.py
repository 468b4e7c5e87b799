"""Run every benchmark package, one after the other; results as JSON in ``benchmarks/results``.

::

    python -m benchmarks [--quick] [NAME ...]
    python -m benchmarks --readme
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.comparison import Report, table

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
README = FOLDER / "README.md"
PUBLISHED = ["actors", "generation", "media", "rollout", "weights"]
"""Packages whose results the README shows."""

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


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


def reports(names: list[str]) -> list[Report]:
    """The reports of the common form that packages have written last."""
    found = []
    for name in names:
        path = RESULTS / f"{name}.json"
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Report))
        except (OSError, msgspec.DecodeError):
            print(f"{path.name}: no report of the common form", file=sys.stderr)
    return found


def section(report: Report) -> str:
    """What a run has found, as Markdown."""
    notes = [f"- {one.name}: {one.note}." for one in report.comparisons if one.note]
    where = f"{report.machine}, Python {report.python}, {report.seconds:.0f} s"
    parts = [f"### {report.package}", where, table(report.comparisons)]
    return "\n\n".join(filter(None, [*parts, "\n".join(dict.fromkeys(notes))]))


def sections(content: str) -> dict[str, str]:
    """Sections by package."""
    return {
        part.split()[1]: part.strip()
        for part in re.split(r"(?m)^(?=### )", content)
        if part.strip()
    }


def write_readme() -> int:
    """Put the last results into the README; what only ran in tiny sizes since keeps its section."""
    before, _, rest = README.read_text().partition(BEGIN)
    content, _, after = rest.partition(END)
    found = {one.package: section(one) for one in reports(PUBLISHED) if not one.quick}
    kept = sections(content) | found
    shown = "\n\n".join(kept[name] for name in PUBLISHED if name in kept)
    README.write_text(f"{before}{BEGIN}\n\n{shown}\n\n{END}{after}")
    return 0


def main() -> int:
    """Run what was asked for; 1 where a target was missed or a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is judged")
    parser.add_argument("--readme", action="store_true", help="only put results into README.md")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(packages()))
    chosen = parser.parse_args()
    if chosen.readme:
        return write_readme()
    unknown = sorted(set(chosen.names) - set(packages()))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(packages())}")
    names = chosen.names or packages()
    RESULTS.mkdir(exist_ok=True)
    codes = [run(name, chosen.quick and takes_quick(name)) for name in names]
    print(table([one for report in reports(names) for one in report.comparisons]))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
