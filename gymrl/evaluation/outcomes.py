"""From what the engine gave for attempts at a task to their lines. Pure.

Attempts that a verifier compares with each other, a *cohort*, count together: where one of them has
failed, what the others got is relative to nothing whole, and all of them have failed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from gymrl.errors import CohortIncomplete, RolloutFailure
from gymrl.evaluation.journal import PendingRow
from gymrl.evaluation.lines import costs_a_try
from gymrl.gym.client import failure_of
from gymrl.records.writer import records_of
from gymrl.types import FailureKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.records.schema import RowRecord
    from gymrl.types import Failure, RolloutGroup

_STREAM_ROW = re.compile(r"^row \d+(?=[: ])")


def attempt_records(
    group: RolloutGroup, pending: Sequence[PendingRow], cohort: str = ""
) -> list[RowRecord]:
    """The lines of attempts that were made together, one each.

    Args:
        group: A row for each of `pending`. A failure's `row` is the place of the attempt that failed,
            which may be another one of the cohort.
        pending: What was attempted.
        cohort: Names the attempts that were compared with each other; empty: there is only one.
    """
    found = [_record_at(group, place) for place in range(len(pending))]
    broken = next((record.failure for record in found if record.failure is not None), None)
    records = []
    for place, (record, row) in enumerate(zip(found, pending, strict=True)):
        failure = record.failure
        if cohort and broken is not None and (failure is None or failure.row != place):
            failure = _of_a_peer(broken, pending)
        records.append(_identified(record, failure, row, cohort))
    return records


def tried_again(
    pending: Sequence[PendingRow], records: Sequence[RowRecord], max_tries: int
) -> tuple[PendingRow, ...]:
    """A cohort that failed by the fleet's fault, as it is to be made again; nothing where it is not.

    A row that stands alone has had its tries in the engine. One of a cohort can't have them: its
    peers have been judged without it, or their verifier lets no attempt in again.

    Args:
        pending: What was attempted.
        records: What became of it.
        max_tries: Times that a row may fail.
    """
    own = [
        record.failure
        for record in records
        if record.failure is not None and record.failure.error != CohortIncomplete.__name__
    ]
    if pending[0].task.group_size == 1 or not own:
        return ()
    if any(each.kind is not FailureKind.INFRA or not costs_a_try(each.fields) for each in own):
        return ()
    again = tuple(PendingRow(row.task, row.repeat, row.tries + 1) for row in pending)
    return again if max(row.tries for row in again) < max_tries else ()


def _record_at(group: RolloutGroup, place: int) -> RowRecord:
    is_last = place == len(group.rows) - 1
    alone = msgspec.structs.replace(
        group,
        rows=(group.rows[place],),
        samples=(group.samples[place],),
        metrics=group.metrics if is_last else {},
        timings=group.timings if is_last else None,
    )
    try:
        (record,) = records_of(alone)
    except RolloutFailure as error:
        failed = msgspec.structs.replace(alone, samples=(failure_of(error, row=place),))
        (record,) = records_of(failed)
    return record


def _of_a_peer(broken: Failure, pending: Sequence[PendingRow]) -> Failure:
    repeat = pending[broken.row or 0].repeat
    return msgspec.structs.replace(
        broken,
        kind=FailureKind.INFRA,
        error=CohortIncomplete.__name__,
        message=f"repeat {repeat}, which it is compared with, failed, so that all of them are made "
        f"again: {_STREAM_ROW.sub('it', broken.message, count=1)}",
        traceback="",
    )


def _identified(
    record: RowRecord, failure: Failure | None, pending: PendingRow, cohort: str
) -> RowRecord:
    """The record under the names that the row has in the evaluation, not in its stream."""
    task, repeat = pending.task, pending.repeat
    index = task.first_row + repeat
    if failure is not None:
        name = f"task {task.task_id!r}, repeat {repeat}"
        message, was_named = _STREAM_ROW.subn(lambda _: name, failure.message, count=1)
        if not was_named:
            message = f"{name}: {message}"
        failure = msgspec.structs.replace(failure, message=message, row=index)
    return msgspec.structs.replace(
        record,
        group=task.number,
        group_size=task.repeats,
        index=index,
        task_index=task.number,
        rollout_index=repeat,
        task_digest=task.key.digest,
        trajectory=None if failure is not None else record.trajectory,
        failure=failure,
        benchmark=task.key.benchmark,
        task_id=task.task_id,
        cohort=cohort,
    )
