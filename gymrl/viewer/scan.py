"""Bytes of a file to the few facts of each row that lists, filters and sorting need.

A line is decoded by a narrow type: token arrays, texts and the server's answer are stepped over, not
built. Lines are numbered from 1, as an editor does. A line counts when its newline is there; one that
is still being written is left alone.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gymrl.gym.schema import LENGTH_REASONS
from gymrl.records.schema import SCHEMA
from gymrl.types import FailureKind, Reward

MAX_LINE_BYTES = 1 << 29
"""A longer line is counted as broken, and its bytes are dropped as they come."""

TRUNCATED, MASKED, PLACEHOLDER, SIDES = 1, 2, 4, 8
"""Bits of :attr:`ScannedRow.flags`: cut off (by a limit or a broken prefix), masked, placeholder, has
side trajectories."""


# What a column of the index can hold.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Turn(msgspec.Struct, gc=False):
    generation_start: _Count
    end: _Count


class _Side(msgspec.Struct, gc=False):
    pass


class _Trajectory(msgspec.Struct):
    agent: str
    turns: list[_Turn]
    reward: Reward
    incomplete_reason: str | None = None
    mask_sample: bool = False
    placeholder: bool = False
    truncated_prefix: bool = False
    side_trajectories: list[_Side] = []


class _Failure(msgspec.Struct, tag="failure"):
    kind: FailureKind
    error: str
    agent: str | None = None


class _Row(msgspec.Struct, tag="row", tag_field="record"):
    group: _Count
    group_size: _Count
    index: _Count
    task_index: _Count
    rollout_index: _Count
    route: str
    trajectory: _Trajectory | None = None
    failure: _Failure | None = None
    benchmark: str = ""


class _Run(msgspec.Struct, tag="run", tag_field="record"):
    schema: int = 1


class ScannedRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the index keeps of one row.

    Attributes:
        line: Its line in the file, from 1.
        offset: Of the line's first byte.
        size: Bytes of the line, its newline included.
        run: How many run records came before it: 0 or 1 but in files that were put together.
        benchmark: Its label, in a file of an evaluation.
        failure: ``kind: error``, or empty for a trajectory.
        reward: The ledger's total; NaN for a failure.
        tokens: All tokens of the main conversation.
        generated: Those that were sampled.
        flags: Bits; see :data:`TRUNCATED`.
    """

    line: int
    offset: int
    size: int
    run: int
    group: int
    group_size: int
    index: int
    task_index: int
    rollout_index: int
    route: str
    agent: str
    benchmark: str
    failure: str
    reward: float
    tokens: int
    generated: int
    turns: int
    flags: int


class BrokenLine(msgspec.Struct, frozen=True):
    """A line that is no record: where it is and what is wrong with it."""

    line: int
    offset: int
    error: str


class Scanned(msgspec.Struct):
    """What one block gave: its rows, its broken lines, and where its run records are."""

    rows: list[ScannedRow] = []
    broken: list[BrokenLine] = []
    runs: list[tuple[int, int]] = []


_decoder = msgspec.json.Decoder(_Row | _Run)


def _summary(row: _Row, line: int, offset: int, size: int, run: int) -> ScannedRow:
    agent, failure, reward = row.route, "", float("nan")
    tokens = generated = turns = flags = 0
    trajectory = row.trajectory
    if trajectory is not None:
        agent = trajectory.agent
        reward = trajectory.reward.total
        turns = len(trajectory.turns)
        tokens = trajectory.turns[-1].end if turns else 0
        generated = sum(turn.end - turn.generation_start for turn in trajectory.turns)
        if not 0 <= generated <= tokens:
            raise msgspec.ValidationError("the turns are no ascending spans")
        flags = (
            TRUNCATED
            * (trajectory.incomplete_reason in LENGTH_REASONS or trajectory.truncated_prefix)
            | MASKED * trajectory.mask_sample
            | PLACEHOLDER * trajectory.placeholder
            | SIDES * bool(trajectory.side_trajectories)
        )
    elif row.failure is not None:
        agent = row.failure.agent or row.route
        failure = f"{row.failure.kind.value}: {row.failure.error}"
    else:
        raise msgspec.ValidationError("the row has no trajectory and no failure")
    return ScannedRow(
        line=line,
        offset=offset,
        size=size,
        run=run,
        group=row.group,
        group_size=row.group_size,
        index=row.index,
        task_index=row.task_index,
        rollout_index=row.rollout_index,
        route=row.route,
        agent=agent,
        benchmark=row.benchmark,
        failure=failure,
        reward=reward,
        tokens=tokens,
        generated=generated,
        turns=turns,
        flags=flags,
    )


class LineScanner:
    """Cut a file into lines, block by block, in order.

    Not safe for two threads at a time; one call may follow another from any thread.

    Args:
        max_line_bytes: See :data:`MAX_LINE_BYTES`.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.complete = 0
        """Offset after the last newline that was seen: what :meth:`drop_pending` goes back to."""
        self._lines = 0
        self._runs = 0
        self._pending = bytearray()
        self._skipping = 0
        self._max_line_bytes = max_line_bytes

    @property
    def read_to(self) -> int:
        """Offset of the next byte to :meth:`scan`."""
        return self.complete + len(self._pending) + self._skipping

    @property
    def lines(self) -> int:
        """Lines seen whole, whatever they were."""
        return self._lines

    def drop_pending(self) -> None:
        """Forget the bytes of a line without an end; they are to be read again, as they are then."""
        self._pending.clear()
        self._skipping = 0

    def scan(self, block: bytes) -> Scanned:
        """Take the next bytes of the file."""
        found = Scanned([], [], [])
        start = 0
        while (newline := block.find(b"\n", start)) >= 0:
            self._take(block[start : newline + 1], found)
            start = newline + 1
        rest = block[start:]
        if self._skipping or len(self._pending) + len(rest) > self._max_line_bytes:
            self._skipping += len(self._pending) + len(rest)
            self._pending.clear()
        else:
            self._pending += rest
        return found

    def _take(self, line: bytes, found: Scanned) -> None:
        """One line's end, what is pending of it before."""
        size = len(self._pending) + self._skipping + len(line)
        offset = self.complete
        self.complete += size
        self._lines += 1
        if self._skipping or size > self._max_line_bytes:
            text = f"{size:,} bytes; lines of at most {self._max_line_bytes:,} are read"
            found.broken.append(BrokenLine(self._lines, offset, text))
        else:
            if self._pending:
                line = bytes(self._pending) + line
            self._decode(line, offset, found)
        self.drop_pending()

    def _decode(self, line: bytes, offset: int, found: Scanned) -> None:
        if not line.strip():
            return
        try:
            record = _decoder.decode(line)
            if isinstance(record, _Run):
                if record.schema > SCHEMA:
                    text = f"schema {record.schema}; this gymrl reads up to {SCHEMA}: upgrade it"
                    found.broken.append(BrokenLine(self._lines, offset, text))
                self._runs += 1
                found.runs.append((offset, len(line)))
            else:
                found.rows.append(_summary(record, self._lines, offset, len(line), self._runs))
        except (msgspec.DecodeError, RecursionError) as error:
            found.broken.append(BrokenLine(self._lines, offset, str(error)))
