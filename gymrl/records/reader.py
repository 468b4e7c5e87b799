"""Lines of a file back to records and groups, one at a time."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import ConfigError, RowValueError
from gymrl.records.grouping import GroupAssembler, Place, RowHead
from gymrl.records.lines import is_json, no_record, read_lines
from gymrl.records.media import MediaFolder
from gymrl.records.schema import RowRecord, RunRecord
from gymrl.types import RolloutGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

_LOST_SHOWN = 5

_line_decoder = msgspec.json.Decoder(RunRecord | RowRecord)
_head_decoder = msgspec.json.Decoder(RunRecord | RowHead)


def check_same_run(path: Path, run: RunRecord, digest: str) -> None:
    """Refuse a file of another configuration.

    Raises:
        ConfigError: The digests differ; both are named.
    """
    if run.config_digest != digest:
        raise ConfigError(
            f"{path} was written with another configuration ({run.config_digest or 'none'}, now "
            f"{digest or 'none'}); use the old configuration or another path",
            setting=str(path),
        )


def read_run(path: str | Path) -> RunRecord:
    """The first line of a file.

    Raises:
        ConfigError: The file is missing or empty, or no file of rollouts that this version reads.
    """
    for _, record in read_lines(Path(path), _line_decoder):
        if isinstance(record, RunRecord):
            return record
    raise ConfigError(f"{path} holds no run", setting=str(path))


def read_records(path: str | Path) -> Iterator[RowRecord]:
    """The rows of a file, one at a time, in the order they were written.

    Raises:
        ConfigError: As :func:`read_run`.
        RowValueError: A line before the last is not what the schema says; names file and line.
    """
    for _, record in read_lines(Path(path), _line_decoder):
        if isinstance(record, RowRecord):
            yield record


def read_groups(path: str | Path) -> Iterator[RolloutGroup]:
    """Whole groups, one at a time, in the order of their last rows.

    Rows of different groups may be interleaved. In a file of an evaluation a group is what there is
    of one task: of an attempt that was made again after it failed only the last line counts, groups
    come once the file was read to its end, and they have no metrics, since nobody measured them
    together. Groups whose rows are not all there are left out; at the end the log says how many.

    What is held is one group and, of groups that are not over, some 500 bytes a line: their lines
    are read a second time when they are. Images come from the folder beside the file, where it is
    there; the attempts at a prompt share their bytes.

    Raises:
        ConfigError, RowValueError: As :func:`read_records`.
    """
    path = Path(path)
    folder = MediaFolder(path)
    assembler = GroupAssembler()
    try:
        with path.open("rb", buffering=0) as file:
            for place, record in read_lines(path, _head_decoder):
                if isinstance(record, RunRecord):
                    assembler.begin_run()
                elif (group := assembler.add(record, place)) is not None:
                    yield _group_at(path, file.fileno(), group.places(), folder)
            for group in assembler.finish():
                yield _group_at(path, file.fileno(), group.places(), folder)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", setting=str(path)) from error
    _tell_lost(path, assembler)


def _group_at(
    path: Path, descriptor: int, places: Sequence[Place], folder: MediaFolder
) -> RolloutGroup:
    """The group whose rows are at these places, in this order."""
    records = []
    for place in places:
        try:
            record = _line_decoder.decode(os.pread(descriptor, place.size, place.offset))
        except msgspec.DecodeError as error:
            raise no_record(path, place.number, error) from error
        if isinstance(record, RunRecord):
            raise RowValueError(f"{path}:{place.number}: the line has changed while it was read")
        records.append(record)
    latest = records[max(range(len(places)), key=lambda at: places[at].number)]
    alone = bool(latest.benchmark)  # each row of an evaluation is a stream of its own
    return RolloutGroup(
        index=latest.group,
        task_index=latest.task_index,
        rows=tuple(record.row(folder) for record in records),
        samples=tuple(record.sample(folder) for record in records),
        metrics={} if alone else next((r.metrics for r in records if r.metrics), {}),
        timings=None
        if alone
        else next((r.timings for r in records if r.timings is not None), None),
    )


def _tell_lost(path: Path, assembler: GroupAssembler) -> None:
    if not assembler.lost:
        return
    shown = ", ".join(
        f"group {group.number} ({group.count} of {group.size} rows)"
        for group in assembler.lost[:_LOST_SHOWN]
    )
    logger.warning(
        "%s: %d groups lack rows and are left out: %s%s",
        path,
        len(assembler.lost),
        shown,
        ", ..." if len(assembler.lost) > _LOST_SHOWN else "",
    )


def finished_attempts(path: str | Path, config_digest: str) -> set[tuple[str, int]]:
    """Which attempts a file holds, as (task digest, rollout index); failed ones don't count.

    Raises:
        ConfigError: The file is of another configuration.
        RowValueError: As :func:`read_records`.
    """
    check_same_run(Path(path), read_run(path), config_digest)
    return {
        (record.task_digest, record.rollout_index)
        for record in read_records(path)
        if record.trajectory is not None
    }


def cut_torn_line(path: str | Path) -> None:
    """Remove a last line that was not written to its end, with a warning; or end it, if whole."""
    with Path(path).open("rb+") as file:
        size = file.seek(0, 2)
        start = _start_of_last_line(file, size)
        file.seek(start)
        tail = file.read()
        if not tail:
            return
        if is_json(tail):
            file.write(b"\n")
            return
        logger.warning("%s: the last line is torn (%d bytes); it is cut off", path, len(tail))
        file.truncate(start)


def _start_of_last_line(file: Any, size: int) -> int:
    """Where the bytes after the last newline begin, reading backwards in blocks."""
    block = 1 << 16
    position = size
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        position = start
    return 0
