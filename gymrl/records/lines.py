"""Lines of a file of records, one at a time, whatever is decoded of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gymrl.errors import ConfigError, RowValueError
from gymrl.records.grouping import Place
from gymrl.records.schema import SCHEMA, RunRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

T = TypeVar("T")


def read_lines(
    path: Path, decoder: msgspec.json.Decoder[RunRecord | T]
) -> Iterator[tuple[Place, RunRecord | T]]:
    """The lines of a file in the order they were written, each with its place.

    A last line without its end is left out with a warning: it is being written, or a kill tore it.
    Blank lines, which an editor may have left, are passed over.

    Args:
        path: The file.
        decoder: Of a line; what it has no field for is passed over.

    Raises:
        ConfigError: The file can't be read, does not begin with a run record, or is of a newer
            format.
        RowValueError: Another line is no record; names file and line.
    """
    offset = 0
    has_header = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = Place(number, offset, len(line))
                offset += len(line)
                if line.isspace():
                    continue
                try:
                    record = decoder.decode(line)
                except msgspec.DecodeError as error:
                    if _is_torn(line):
                        logger.warning(
                            "%s:%d: the last line is torn (%d bytes); it is left out",
                            path,
                            number,
                            len(line),
                        )
                        return
                    raise no_record(path, number, error) from error
                if not has_header:
                    _check_header(path, record)
                    has_header = True
                yield place, record
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", setting=str(path)) from error


def no_record(path: Path, number: int, error: msgspec.DecodeError) -> RowValueError:
    """The error of a line that the decoder refuses."""
    return RowValueError(f"{path}:{number}: not a record of rollouts: {error}")


def is_json(line: bytes) -> bool:
    """Whether a line was written whole, its newline left aside."""
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return True


def _is_torn(line: bytes) -> bool:
    return not line.endswith(b"\n") and not is_json(line)


def _check_header(path: Path, record: object) -> None:
    if not isinstance(record, RunRecord):
        raise ConfigError(f"{path}: the first line is no run record", setting=str(path))
    check_schema(path, record)


def check_schema(path: Path, run: RunRecord) -> None:
    """Refuse a file that a newer version wrote.

    Raises:
        ConfigError: Its schema is above :data:`gymrl.records.schema.SCHEMA`.
    """
    if run.schema > SCHEMA:
        raise ConfigError(
            f"{path} has schema {run.schema}; this gymrl reads up to {SCHEMA}: upgrade it",
            setting=str(path),
        )
