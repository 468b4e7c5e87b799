"""Lines of a file back to records and groups, one at a time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import ConfigError, RowValueError
from gymrl.records.media import MediaFolder
from gymrl.records.schema import SCHEMA, RowRecord, RunRecord
from gymrl.types import RolloutGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_line_decoder = msgspec.json.Decoder(RunRecord | RowRecord)


def _read_lines(path: Path) -> Iterator[RunRecord | RowRecord]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = _line_decoder.decode(line)
            except msgspec.DecodeError as error:
                if not line.endswith(b"\n") and not _decodes(line):
                    logger.warning(
                        "%s:%d: the last line is torn (%d bytes); it is left out",
                        path,
                        number,
                        len(line),
                    )
                    return
                raise RowValueError(
                    f"{path}:{number}: not a record of rollouts: {error}"
                ) from error
            if number == 1:
                _check_header(path, record)
            yield record


def _check_header(path: Path, record: RunRecord | RowRecord) -> None:
    if not isinstance(record, RunRecord):
        raise ConfigError(f"{path}: the first line is no run record", setting=str(path))
    if record.schema > SCHEMA:
        raise ConfigError(
            f"{path} has schema {record.schema}; this gymrl reads up to {SCHEMA}: upgrade it",
            setting=str(path),
        )


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
    for record in _open_lines(Path(path)):
        if isinstance(record, RunRecord):
            return record
    raise ConfigError(f"{path} holds no run", setting=str(path))


def read_records(path: str | Path) -> Iterator[RowRecord]:
    """The rows of a file, one at a time, in the order they were written.

    Raises:
        ConfigError: As :func:`read_run`.
        RowValueError: A line before the last is not what the schema says; names file and line.
    """
    for record in _open_lines(Path(path)):
        if isinstance(record, RowRecord):
            yield record


def _open_lines(path: Path) -> Iterator[RunRecord | RowRecord]:
    try:
        yield from _read_lines(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", setting=str(path)) from error


def read_groups(path: str | Path) -> Iterator[RolloutGroup]:
    """Whole groups, one at a time; a group whose rows are not all there is left out.

    Images come from the folder beside the file, where it is there; the attempts at a prompt share
    their bytes.

    Raises:
        ConfigError, RowValueError: As :func:`read_records`.
    """
    held: list[RowRecord] = []
    folder = MediaFolder(path)
    for record in read_records(path):
        if held and (record.group, record.task_index) != (held[0].group, held[0].task_index):
            logger.warning(
                "%s: group %d has %d of %d rows; it is left out",
                path,
                held[0].group,
                len(held),
                held[0].group_size,
            )
            held = []
        held.append(record)
        if len(held) == record.group_size:
            yield RolloutGroup(
                index=record.group,
                task_index=held[0].task_index,
                rows=tuple(each.row(folder) for each in held),
                samples=tuple(each.sample(folder) for each in held),
                metrics=record.metrics,
                timings=record.timings,
            )
            held = []


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
        if _decodes(tail):
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


def _decodes(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return True
