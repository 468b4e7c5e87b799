"""Images across a link between processes, each once for a group of rows.

The two ends of a call each have a :class:`MediaExchange` made from the same rows. What one end has
sent or received of a group, it neither sends nor needs again: empty bytes stand for an image that
the other end has. When the last row of a group has its result, both forget the group's images.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gymrl.errors import RolloutStreamError
from gymrl.types import Row, RowResult, Trajectory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gymrl.types import RolloutGroup


class MediaPayload(msgspec.Struct):
    """What images took on links between driver and workers, both ways, counted at the driver.

    Attributes:
        images: Images that rows and results have, repeats counted.
        sent: Images whose bytes crossed.
        logical_bytes: All images with their repeats, encoded.
        physical_bytes: Those that crossed.
        serialized_bytes: The same and the references that stand for the others, as messages
            hold them.
    """

    images: int = 0
    sent: int = 0
    logical_bytes: int = 0
    physical_bytes: int = 0
    serialized_bytes: int = 0

    def add(self, full: Mapping[str, bytes], thin: Mapping[str, bytes]) -> None:
        """Count the images of one row or result, as they are and as they crossed."""
        if not full:
            return
        self.images += len(full)
        self.sent += sum(1 for data in thin.values() if data)
        self.logical_bytes += sum(map(len, full.values()))
        self.physical_bytes += sum(map(len, thin.values()))
        without = msgspec.msgpack.encode(dict.fromkeys(thin, b""))
        self.serialized_bytes += len(without) + sum(map(_grown, thin.values()))

    def metrics(self) -> dict[str, float]:
        """The counts by metric name."""
        return {
            f"media_payload/{name}": float(getattr(self, name)) for name in self.__struct_fields__
        }


def _grown(data: bytes) -> int:
    """How many bytes more a message has with `data` than with an empty one in its place."""
    header = 2 if len(data) < 1 << 8 else 3 if len(data) < 1 << 16 else 5
    return len(data) + header - 2


class MediaExchange:
    """One end of a call that brings rows one way and their results the other.

    Results must pass in the order in which they cross.

    Args:
        rows: Of the call; on the receiving end as they came.
        counted: What crosses is counted in each of these.
    """

    def __init__(self, rows: Sequence[Row], counted: Sequence[MediaPayload] = ()) -> None:
        self._task_of = {row.index: row.task_index for row in rows}
        self._left = Counter(row.task_index for row in rows)
        self._known: dict[int, dict[str, bytes]] = {}
        self._counted = tuple(counted)

    def thin_rows(self, rows: Sequence[Row]) -> list[Row]:
        """The rows as they are to cross."""
        return [
            msgspec.structs.replace(row, media=self._thin(row.task_index, row.media))
            if row.media
            else row
            for row in rows
        ]

    def full_rows(self, rows: Sequence[Row]) -> list[Row]:
        """The rows as they were before they crossed.

        Raises:
            RolloutStreamError: An image was left out that never came.
        """
        return [
            msgspec.structs.replace(row, media=self._full(row.task_index, row.media, row.index))
            if row.media
            else row
            for row in rows
        ]

    def thin_result(self, result: RowResult) -> RowResult:
        """A result as it is to cross."""
        return self._passed(result, is_thin=False)

    def full_result(self, result: RowResult) -> RowResult:
        """A result as it was before it crossed.

        Raises:
            RolloutStreamError: An image was left out that never came.
        """
        return self._passed(result, is_thin=True)

    def _passed(self, result: RowResult, *, is_thin: bool) -> RowResult:
        task = self._task_of.get(result.index)
        if task is None:  # no row of this call: the reader of the stream says so
            return result
        outcome = result.outcome
        if isinstance(outcome, Trajectory) and outcome.media:
            if is_thin:
                media = self._full(task, outcome.media, result.index)
            else:
                media = self._thin(task, outcome.media)
            outcome = msgspec.structs.replace(outcome, media=media)
            result = msgspec.structs.replace(result, outcome=outcome)
        self._left[task] -= 1
        if self._left[task] <= 0:
            self._known.pop(task, None)
        return result

    def _thin(self, task: int, media: Mapping[str, bytes]) -> dict[str, bytes]:
        known = self._known.setdefault(task, {})
        thin = {digest: b"" if digest in known else data for digest, data in media.items()}
        known.update(media)
        self._count(media, thin)
        return thin

    def _full(self, task: int, thin: Mapping[str, bytes], row: int) -> dict[str, bytes]:
        known = self._known.setdefault(task, {})
        for digest, data in thin.items():
            if data:
                known.setdefault(digest, data)
        missing = [digest for digest in thin if digest not in known]
        if missing:
            raise RolloutStreamError(
                f"row {row}: image sha256:{missing[0]} was left out as known, but never came",
                row=row,
            )
        full = {digest: known[digest] for digest in thin}
        self._count(full, thin)
        return full

    def _count(self, full: Mapping[str, bytes], thin: Mapping[str, bytes]) -> None:
        for payload in self._counted:
            payload.add(full, thin)


def take_media(groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], dict[str, bytes]]:
    """Groups without the bytes of their images, and those once each, for a message of many groups.

    Returns:
        The groups, with empty bytes under each digest, and the bytes by digest.
    """
    table: dict[str, bytes] = {}
    for group in groups:
        for row in group.rows:
            table.update(row.media)
        for trajectory in group.trajectories:
            table.update(trajectory.media)
    empty = dict.fromkeys(table, b"")
    return (give_media(groups, empty), table) if table else (list(groups), {})


def give_media(groups: Sequence[RolloutGroup], table: Mapping[str, bytes]) -> list[RolloutGroup]:
    """Groups with the bytes of their images from a table; equal images are one object."""
    return [
        msgspec.structs.replace(
            group,
            rows=tuple(_filled(row, table) for row in group.rows),
            samples=tuple(
                _filled(sample, table) if isinstance(sample, Trajectory) else sample
                for sample in group.samples
            ),
        )
        for group in groups
    ]


HolderT = TypeVar("HolderT", Row, Trajectory)


def _filled(holder: HolderT, table: Mapping[str, bytes]) -> HolderT:
    if not holder.media:
        return holder
    media = {digest: table[digest] for digest in holder.media}
    return msgspec.structs.replace(holder, media=media)
