"""Which lines of a file make a group. Bookkeeping only: lines are places, nothing is read here.

Two kinds of files are told apart by their rows. A writer of groups
(:class:`~gymrl.records.writer.RecordWriter`) writes each of them once, so a group is over with its
last row, and its number may come again, from the next stream of the same run. An evaluation's rows
(they name their benchmark) come as they end, a failed one once more for each time it is tried again:
its groups are over with the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator


class FailureHead(msgspec.Struct, frozen=True, gc=False):
    """Of a failure: that it is there."""


class RowHead(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="row", tag_field="record"):
    """What says where a row belongs, without tokens and texts.

    Fields are those of :class:`~gymrl.records.schema.RowRecord`.
    """

    group: int
    group_size: int
    index: int
    task_index: int
    rollout_index: int
    rollout_id: str
    task_digest: str
    benchmark: str = ""
    cohort: str = ""
    failure: FailureHead | None = None

    @property
    def attempt(self) -> int:
        """Which of its group's attempts it is; a plan that grew has given it another index."""
        return self.rollout_index if self.benchmark else self.index


class Place(NamedTuple):
    """Where a line is: its number from 1, its first byte, and how many there are."""

    number: int
    offset: int
    size: int


class HeldLine(msgspec.Struct, frozen=True, gc=False):
    """The line that counts of one attempt.

    Attributes:
        place: Where it is.
        rollout_id: The row's.
        task_digest: The row's.
        cohort: The row's.
        failed: It has no result, so a later line may take its place.
    """

    place: Place
    rollout_id: str
    task_digest: str
    cohort: str
    failed: bool

    def gives_way_to(self, row: RowHead) -> bool:
        """Whether the row was made because this one does not count.

        A cohort is made again when not all of it was written.
        """
        return row.task_digest == self.task_digest and (self.failed or row.cohort != self.cohort)


class OpenGroup(msgspec.Struct):
    """A group of which lines were found.

    Attributes:
        number: Its index, as its latest line says.
        size: Rows that it should have, likewise.
        last: Number of its latest line that counts.
    """

    number: int
    size: int
    last: int = 0
    _held: dict[int, HeldLine] = {}

    @property
    def count(self) -> int:
        """Attempts that were found."""
        return len(self._held)

    @property
    def is_complete(self) -> bool:
        """Whether all attempts were found."""
        return len(self._held) >= self.size

    def places(self) -> list[Place]:
        """The line of each attempt, in the order of attempts."""
        return [self._held[attempt].place for attempt in sorted(self._held)]

    def take(self, row: RowHead, place: Place) -> bool:
        """Take a line, in place of an earlier one of the same attempt that does not count.

        Returns:
            False where the attempt has a line that the row can't replace.
        """
        before = self._held.get(row.attempt)
        if before is not None and not before.gives_way_to(row):
            return False
        self.number, self.size, self.last = row.group, row.group_size, place.number
        self._held[row.attempt] = HeldLine(
            place, row.rollout_id, row.task_digest, row.cohort, row.failure is not None
        )
        return True

    def has(self, row: RowHead) -> bool:
        """Whether the row's attempt is there by the same rollout id: its line stands twice."""
        held = self._held.get(row.attempt)
        return held is not None and held.rollout_id == row.rollout_id


class GroupAssembler:
    """Lines in file order to groups.

    Memory is some 500 bytes for each line of a group that is not over, however large lines are:
    with a writer of groups that is one group, of an evaluation it is all of its lines.
    """

    def __init__(self) -> None:
        self._run = 0
        self._open: dict[tuple[object, ...], OpenGroup] = {}
        self._lost: list[OpenGroup] = []

    def begin_run(self) -> None:
        """A line that begins a run: what follows belongs to none of the groups before."""
        self._run += 1

    def add(self, row: RowHead, place: Place) -> OpenGroup | None:
        """Take a row.

        Returns:
            The row's group, where this line ends it.
        """
        if row.benchmark:
            key: tuple[object, ...] = (self._run, row.benchmark, row.task_digest)
            # A result stays; a line that comes after it is passed over, as reports do.
            self._group(key, row).take(row, place)
            return None
        key = (self._run, row.group, row.task_index)
        group = self._group(key, row)
        if group.has(row):
            return None
        if not group.take(row, place):
            # The next stream counts its groups from 0 again.
            self._lost.append(self._open.pop(key))
            group = self._group(key, row)
            group.take(row, place)
        if not group.is_complete:
            return None
        return self._open.pop(key)

    def _group(self, key: tuple[object, ...], row: RowHead) -> OpenGroup:
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = OpenGroup(row.group, row.group_size)
        return group

    def finish(self) -> Iterator[OpenGroup]:
        """The groups that are over with the file, in the order of their last lines."""
        whole = [group for group in self._open.values() if group.is_complete]
        self._lost += [group for group in self._open.values() if not group.is_complete]
        self._open = {}
        yield from sorted(whole, key=lambda group: group.last)

    @property
    def lost(self) -> list[OpenGroup]:
        """Groups that lack rows; all of them are known after :meth:`finish`."""
        return self._lost
