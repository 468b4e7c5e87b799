"""All rows of a file as columns of numbers, and the groups they make.

A row takes 77 bytes here, whatever its tokens and texts take in the file; columns grow by half, so at
most half as much again is spare. A group takes about 250 bytes. Names (agents, routes, failures) are
kept once each.

Rows are only ever appended. A view of a column that was handed out stays as it was while later rows
come, so queries may run in a thread beside the scan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gymrl.viewer.scan import BrokenLine, Scanned, ScannedRow

BROKEN_KEPT = 20
"""Broken lines that are kept by name; the rest are counted."""

_COLUMNS: dict[str, type] = {
    "line": np.int64,
    "offset": np.int64,
    "size": np.int64,
    "group": np.int32,
    "index": np.int64,
    "rollout_index": np.int32,
    "route": np.int32,
    "agent": np.int32,
    "benchmark": np.int32,
    "failure": np.int32,
    "reward": np.float64,
    "tokens": np.int32,
    "generated": np.int32,
    "turns": np.int32,
    "flags": np.uint8,
}
BYTES_PER_ROW = sum(np.dtype(kind).itemsize for kind in _COLUMNS.values())
_FIRST_CAPACITY = 1024
Column = npt.NDArray[Any]


class Group(msgspec.Struct, frozen=True, gc=False):
    """What rows of one prompt have in common.

    Attributes:
        run: Which run of the file, from 1.
        group: Its index in the run.
        size: Rows that it should have.
    """

    run: int
    group: int
    task_index: int
    route: str
    size: int


class Names:
    """Texts that repeat, as small numbers."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._number: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a text; a new one gets the next."""
        found = self._number.get(text)
        if found is None:
            found = self._number[text] = len(self.texts)
            self.texts.append(text)
        return found

    def find(self, text: str) -> int | None:
        """The number of a text that was seen."""
        return self._number.get(text)


class NameTables(msgspec.Struct, frozen=True):
    """The names that rows carry. Failures are ``kind: error``; benchmarks may be empty."""

    agents: Names
    routes: Names
    failures: Names
    benchmarks: Names


class GroupStats(msgspec.Struct, frozen=True):
    """Numbers of each group, in the order of groups; rewards are NaN where no row has one.

    Attributes:
        rows: Rows that count: of attempts made again only the last.
        failures: Of them, without a trajectory.
        truncated: Of them, cut off.
        tokens: Mean tokens of a trajectory.
        first: The first row of each group.
    """

    rows: Column
    failures: Column
    truncated: Column
    minimum: Column
    mean: Column
    maximum: Column
    deviation: Column
    tokens: Column
    first: Column


class Snapshot(msgspec.Struct, frozen=True):
    """The index as it was at one moment. Arrays are not to be written to.

    Attributes:
        columns: One value a row, in file order.
        groups: All groups, in the order of their first rows.
        superseded: Rows whose attempt was made again later in the file.
        stats: Of the groups, over rows that are not superseded.
    """

    columns: dict[str, Column]
    groups: list[Group]
    superseded: Column
    stats: GroupStats

    @property
    def num_rows(self) -> int:
        """All rows, superseded ones included."""
        return len(self.superseded)

    def row_at_line(self, line: int) -> int | None:
        """Which row a line of the file is."""
        lines = self.columns["line"]
        place = int(np.searchsorted(lines, line))
        return place if place < len(lines) and lines[place] == line else None

    def rows_of(self, group: int) -> list[int]:
        """The rows of a group, by attempt, attempts made again in file order."""
        rows = np.flatnonzero(self.columns["group"] == group)
        return [
            int(r) for r in rows[np.argsort(self.columns["rollout_index"][rows], kind="stable")]
        ]


class RolloutIndex:
    """Rows and groups of one file, while it is read."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_broken = 0
        self.broken: list[BrokenLine] = []
        self.runs: list[tuple[int, int]] = []
        self.names = NameTables(Names(), Names(), Names(), Names())
        self._columns: dict[str, Column] = {
            name: np.empty(_FIRST_CAPACITY, dtype) for name, dtype in _COLUMNS.items()
        }
        self._groups: list[Group] = []
        self._group_number: dict[tuple[int, int, int, str], int] = {}
        self._snapshot: Snapshot | None = None

    @property
    def num_groups(self) -> int:
        """Groups of which at least one row was read."""
        return len(self._groups)

    def extend(self, scanned: Scanned) -> None:
        """Append what a block gave."""
        self.num_broken += len(scanned.broken)
        self.broken += scanned.broken[: BROKEN_KEPT - len(self.broken)]
        self.runs += scanned.runs
        if not scanned.rows:
            return
        self._reserve(self.num_rows + len(scanned.rows))
        span = slice(self.num_rows, self.num_rows + len(scanned.rows))
        for name, values in self._values(scanned.rows):
            self._columns[name][span] = values
        self.num_rows = span.stop

    def _values(self, rows: list[ScannedRow]) -> Iterable[tuple[str, list[Any]]]:
        names = self.names
        numbers = {
            "group": [self._group(row) for row in rows],
            "route": [names.routes.number(row.route) for row in rows],
            "agent": [names.agents.number(row.agent) for row in rows],
            "benchmark": [names.benchmarks.number(row.benchmark) for row in rows],
            "failure": [names.failures.number(row.failure) if row.failure else -1 for row in rows],
        }
        for name in _COLUMNS:
            yield name, numbers.get(name) or [getattr(row, name) for row in rows]

    def _group(self, row: ScannedRow) -> int:
        key = (row.run, row.group, row.task_index, row.route)
        number = self._group_number.get(key)
        if number is None:
            number = self._group_number[key] = len(self._groups)
            self._groups.append(Group(*key, row.group_size))
        return number

    def _reserve(self, rows: int) -> None:
        capacity = len(self._columns["line"])
        if rows <= capacity:
            return
        capacity = max(rows, capacity + capacity // 2)
        for name, column in self._columns.items():
            grown = np.empty(capacity, column.dtype)
            grown[: self.num_rows] = column[: self.num_rows]
            self._columns[name] = grown

    def freeze(self) -> tuple[dict[str, Column], list[Group]]:
        """The rows and groups of this moment, for :func:`take_snapshot`; microseconds."""
        return {name: c[: self.num_rows] for name, c in self._columns.items()}, list(self._groups)


def take_snapshot(columns: dict[str, Column], groups: list[Group]) -> Snapshot:
    """Count what groups have; a tenth of a second for a million rows.

    Args:
        columns: As :meth:`RolloutIndex.freeze` gave them.
        groups: The same.
    """
    superseded = _superseded(columns)
    return Snapshot(columns, groups, superseded, _stats(columns, superseded, len(groups)))


def _superseded(columns: dict[str, Column]) -> Column:
    """Which rows have a later one of the same group and attempt."""
    rows = len(columns["line"])
    attempt = columns["group"].astype(np.int64) << 32 | columns["rollout_index"]
    _, last = np.unique(attempt[::-1], return_index=True)
    superseded = np.ones(rows, dtype=np.bool_)
    superseded[rows - 1 - last] = False
    return superseded


def _stats(columns: dict[str, Column], superseded: Column, groups: int) -> GroupStats:
    group = columns["group"]
    counted = ~superseded
    scored = counted & (columns["failure"] < 0)

    def count(chosen: Column) -> Column:
        return np.bincount(group[chosen], minlength=groups)

    rewards, of = columns["reward"][scored], group[scored]
    number = np.bincount(of, minlength=groups)
    minimum, maximum = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(minimum, of, rewards)
    np.maximum.at(maximum, of, rewards)
    # Without a reward there is no mean, and very large ones have no square.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.bincount(of, rewards, minlength=groups) / number
        variance = np.bincount(of, (rewards - mean[of]) ** 2, minlength=groups) / number
        tokens = np.bincount(of, columns["tokens"][scored], minlength=groups) / number
    first = np.zeros(groups, dtype=np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    return GroupStats(
        rows=count(counted),
        failures=count(counted & (columns["failure"] >= 0)),
        truncated=count(counted & (columns["flags"] & 1 > 0)),
        minimum=np.where(number > 0, minimum, np.nan),
        mean=mean,
        maximum=np.where(number > 0, maximum, np.nan),
        deviation=np.sqrt(variance),
        tokens=tokens,
        first=first,
    )
