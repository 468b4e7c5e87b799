"""Two things measured in turn, their ratio, and what it should be.

The machine is never idle: what is compared is measured in turns, a few of each, and the ratio is the
median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

Measure = Callable[[], Awaitable[float]]
"""Does the work once and returns the seconds (per call, per row) that it took."""


OWN = "gymrl"
ALONE = "alone"


class Comparison(msgspec.Struct, kw_only=True):
    """One question with a target.

    Attributes:
        name: What is compared.
        unit: Of the sides.
        sides: The median of each.
        ratio: How it is made of the sides, in words.
        value: That ratio, the median of the turns; None where a side is missing.
        best: The same of each side's best turn, where that was taken.
        target: What it has to be.
        at_least: The target is a lower bound; else an upper one.
        note: What else there is to know.
    """

    name: str
    unit: str
    sides: dict[str, float]
    ratio: str
    value: float | None
    target: float
    at_least: bool
    best: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None where nothing could be compared."""
        if self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


class Report(msgspec.Struct, kw_only=True):
    """All comparisons of one run of one package, as its JSON has them."""

    package: str
    machine: str
    python: str
    quick: bool
    seconds: float
    comparisons: list[Comparison]
    details: dict[str, Any] = {}


class Turns:
    """Seconds that gymrl and others took, measured by turns, each of the others beside gymrl.

    Args:
        pairs: For each of the others, gymrl's seconds and its own, turn by turn.
    """

    def __init__(self, pairs: dict[str, list[tuple[float, float]]]) -> None:
        self._pairs = pairs

    def medians(self, own: str = OWN) -> dict[str, float]:
        """The median seconds of each side, gymrl's (called `own`) first."""
        mine = [pair[0] for pairs in self._pairs.values() for pair in pairs]
        others = {
            name: statistics.median(pair[1] for pair in pairs)
            for name, pairs in self._pairs.items()
            if name != ALONE
        }
        return {own: statistics.median(mine), **others}

    def rates(self, count: float, own: str = OWN) -> dict[str, float]:
        """The same as so many things a second."""
        return {name: count / seconds for name, seconds in self.medians(own).items()}

    def times_longer(self, other: str) -> float | None:
        """Gymrl's seconds by the other's, the median of the turns; None where it is missing."""
        pairs = self._pairs.get(other)
        return None if not pairs else statistics.median(mine / its for mine, its in pairs)

    def times_faster(self, other: str) -> float | None:
        """The inverse of :meth:`times_longer`."""
        ratio = self.times_longer(other)
        return None if ratio is None else 1 / ratio

    def best_faster(self, other: str) -> float | None:
        """The other's least seconds by gymrl's least, which noise of the machine hardly touches."""
        pairs = self._pairs.get(other)
        if not pairs:
            return None
        mine = min(pair[0] for every in self._pairs.values() for pair in every)
        return min(pair[1] for pair in pairs) / mine


async def take_turns(own: Measure, others: Mapping[str, Measure], rounds: int) -> Turns:
    """Measure `own` before each of the others, `rounds` times; one round more is not counted."""
    measures = others or {ALONE: own}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in measures}
    for turn in range(rounds + 1):
        for name, other in measures.items():
            pair = (await own(), await other())
            if turn:
                pairs[name].append(pair)
    return Turns(pairs)


def table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a Markdown table."""
    lines = [
        "| what | target | measured | reached | both sides |",
        "|---|---|---|---|---|",
    ]
    for one in comparisons:
        sign = "≥" if one.at_least else "≤"
        value = "not measured" if one.value is None else f"{one.value:.3g}"
        if one.best is not None:
            value += f" (best turns: {one.best:.3g})"
        reached = {True: "yes", False: "**no**", None: "-"}[one.reached]
        sides = ", ".join(f"{name} {_short(number)}" for name, number in one.sides.items())
        lines.append(
            f"| {one.name}: {one.ratio} | {sign} {one.target:g} | {value} | {reached} |"
            f" {sides} {one.unit} |"
        )
    return "\n".join(lines)


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def options(description: str) -> argparse.Namespace:
    """The command line that every package has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; targets are not judged")
    return parser.parse_args()


class Clock:
    """Says how long a run has taken, for its report."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def report(
        self, package: str, comparisons: list[Comparison], details: dict[str, Any], quick: bool
    ) -> Report:
        """What a run has found."""
        return Report(
            package=package,
            machine=f"{platform.machine()}, {os.cpu_count()} CPUs",
            python=platform.python_version(),
            quick=quick,
            seconds=time.perf_counter() - self._started,
            comparisons=comparisons,
            details=details,
        )


def publish(report: Report, path: Path | None) -> int:
    """Print a report, write it down, and say as an exit code whether all targets are reached."""
    print(table(report.comparisons))
    for one in report.comparisons:
        if one.note:
            print(f"- {one.name}: {one.note}")
    print(f"{report.package}: {report.seconds:.0f} s")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    missed = any(one.reached is False for one in report.comparisons)
    return int(missed and not report.quick)
