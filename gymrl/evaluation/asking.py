"""Attempts at planned tasks through a rollout engine: each in a stream of its own, or a cohort in one."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING

import anyio
import msgspec

from gymrl.concurrency import closing_stream
from gymrl.errors import RolloutRedispatchExhausted
from gymrl.evaluation.outcomes import attempt_records
from gymrl.evaluation.tasks import attempt_row
from gymrl.gym.client import failure_of
from gymrl.records.schema import RowRecord
from gymrl.rollout.prepare import GroupSizes, prepare_rows
from gymrl.types import Failure, RolloutGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from gymrl.config import SamplingParams
    from gymrl.evaluation.journal import PendingRow
    from gymrl.evaluation.settings import EvaluationSettings
    from gymrl.rollout.engine import RolloutEngine, RolloutStream
    from gymrl.scoring import GroupStats
    from gymrl.types import RowResult


class _Watched:
    """A stream of a cohort that is going on."""

    def __init__(self, stream: RolloutStream, scope: anyio.CancelScope) -> None:
        self.stream = stream
        self.failure: Failure | None = None
        self._scope = scope

    def end(self, failure: Failure) -> None:
        self.failure = failure
        self._scope.cancel()


class CohortWatch:
    """The engine's observer: ends a cohort as soon as one of it has failed for good.

    Its peers' verifier would wait for that one, for as long as its deadline says.
    """

    def __init__(self) -> None:
        self._open: list[_Watched] = []

    @contextlib.contextmanager
    def watching(self, stream: RolloutStream) -> Iterator[_Watched]:
        """Cancel the block when a row of the stream has failed, which the result then tells."""
        with anyio.CancelScope() as scope:
            watched = _Watched(stream, scope)
            self._open.append(watched)
            try:
                yield watched
            finally:
                self._open.remove(watched)

    def on_row(self, result: RowResult, instance: str) -> None:
        """A row has ended; its stream is the one that has counted a failure since."""
        del instance
        if isinstance(result.outcome, Failure):
            for watched in self._open:
                if watched.failure is None and watched.stream.progress.rows_failed:
                    watched.end(result.outcome)

    def on_group(self, group: RolloutGroup, stats: GroupStats) -> None:
        """A group is whole."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What became of attempts that were made together.

    Attributes:
        records: Their lines.
        group: Has the images that the lines refer to.
        outage: The fleet has failed them; None: it was up.
    """

    records: list[RowRecord]
    group: RolloutGroup
    outage: RolloutRedispatchExhausted | None = None


class TaskAsker:
    """Makes attempts at planned tasks.

    Args:
        engine: Observed by `watch`.
        watch: Ends cohorts.
        settings: The evaluation's.
        renamed: For each benchmark's label, its instances that bear another name in this run.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        watch: CohortWatch,
        settings: EvaluationSettings,
        renamed: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._settings = settings
        self._renamed = renamed

    def row(self, pending: PendingRow) -> tuple[dict[str, Any], SamplingParams]:
        """The dataset row of an attempt, and what it is sampled with."""
        renamed = self._renamed.get(pending.task.key.benchmark)
        return attempt_row(pending.task, pending.repeat, self._settings, renamed)

    async def ask(self, pending: Sequence[PendingRow]) -> Asked:
        """Make attempts at one task, all at once.

        Raises:
            GymrlError: The run cannot go on.
        """
        cohort = uuid.uuid4().hex if pending[0].task.group_size > 1 else ""
        asked = [self.row(each) for each in pending]
        rows, sampling = [row for row, _ in asked], asked[0][1]
        sizes = GroupSizes(group=len(rows))
        stream = self._engine.stream_repeated(rows, sizes, sampling=sampling, training=False)
        samples: tuple[Failure, ...] = ()
        outage: RolloutRedispatchExhausted | None = None
        found: list[RolloutGroup] = []
        try:
            with contextlib.ExitStack() as stack:
                watched = stack.enter_context(self._watch.watching(stream)) if cohort else None
                async with closing_stream(stream) as groups:
                    found = [group async for group in groups]
            if watched is not None and watched.failure is not None:
                samples = (watched.failure,) * len(rows)
        except RolloutRedispatchExhausted as error:
            outage = error
            failure = failure_of(error.__cause__ or error)
            failure = msgspec.structs.replace(failure, attempts=error.attempts or 1)
            samples = tuple(
                msgspec.structs.replace(failure, row=place) for place in range(len(rows))
            )
        if samples:
            prepared = tuple(prepare_rows(rows, sampling, sizes, is_training=False))
            number = pending[0].task.number
            group = RolloutGroup(index=0, task_index=number, rows=prepared, samples=samples)
        else:
            (group,) = found
        return Asked(records=attempt_records(group, pending, cohort), group=group, outage=outage)
