"""Rollouts on disk: JSON lines, one row a line, whole at any moment.

The first line says what the file is (:class:`RunRecord`), every other line is one row with all that
is known of it (:class:`RowRecord`). A line is written in one piece, so a process that is killed
leaves at most one torn line at the end; the reader drops it with a warning and the writer cuts it
off before it appends.

Images are in a folder beside the file, each once (:class:`MediaFolder`).

A row is found again by (task digest, rollout index), within one configuration digest; see
:func:`finished_attempts`.
"""

from gymrl.records.digests import config_digest, task_digest
from gymrl.records.media import MediaFolder
from gymrl.records.reader import finished_attempts, read_groups, read_records, read_run
from gymrl.records.schema import SCHEMA, RowRecord, RunRecord, SamplingRecord, TrajectoryRecord
from gymrl.records.writer import RecordWriter, records_of

__all__ = [
    "SCHEMA",
    "MediaFolder",
    "RecordWriter",
    "RowRecord",
    "RunRecord",
    "SamplingRecord",
    "TrajectoryRecord",
    "config_digest",
    "finished_attempts",
    "read_groups",
    "read_records",
    "read_run",
    "records_of",
    "task_digest",
]
