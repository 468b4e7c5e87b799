"""The rows of a run, from what is pending to their lines."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

from gymrl.errors import ConfigError, RolloutRedispatchExhausted
from gymrl.evaluation.journal import Journal, PendingRow
from gymrl.evaluation.outcomes import tried_again
from gymrl.gym.shards import row_route

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from gymrl.evaluation.asking import TaskAsker
    from gymrl.evaluation.plan import EvaluationPlan
    from gymrl.evaluation.settings import RunOptions
    from gymrl.records.schema import RowRecord

logger = logging.getLogger(__name__)


class EvaluationObserver(Protocol):
    """Told how far a run is, in its event loop. The calls should return at once."""

    def begin(self, plan: EvaluationPlan, finished: int, pending: int) -> None:
        """The directory was read.

        Args:
            plan: As it is run.
            finished: Rows of it that have their result already.
            pending: Rows that are run now; the others have failed too often.
        """
        ...

    def started(self) -> None:
        """The model and the servers are ready; rows run from now on."""
        ...

    def row(self, record: RowRecord) -> None:
        """A row has ended, and its line is written; attempts that are made again have not ended."""
        ...


class RowRunner:
    """Takes rows through the engine and writes what becomes of them.

    Args:
        asker: Makes attempts.
        journal: Open.
        options: Of the run.
        observer: Told of rows; None: nobody is.
    """

    def __init__(
        self,
        asker: TaskAsker,
        journal: Journal,
        options: RunOptions,
        observer: EvaluationObserver | None,
    ) -> None:
        self._asker = asker
        self._journal = journal
        self._options = options
        self._observer = observer
        self._outages = 0
        self._again: deque[tuple[PendingRow, ...]] = deque()

    def check_routes(self, routes: Collection[str]) -> None:
        """Refuse a plan whose rows name servers that are not there.

        Raises:
            ConfigError: The first, with its benchmark.
        """
        for task in self._journal.plan.tasks() if routes else ():
            row, _ = self._asker.row(PendingRow(task, 0, 0))
            route = row_route(row, 0)
            if route not in routes:
                raise ConfigError(
                    f"benchmark {task.key.benchmark!r}, task {task.task_id!r}: nothing here is "
                    f"called {route!r} (known: {', '.join(sorted(routes))})",
                    setting="registry_url",
                )

    async def work(self, pending: Iterator[tuple[PendingRow, ...]]) -> None:
        """Run rows until there are no more; several of these share the iterator.

        Attempts that are compared with each other, and failed by the fleet's fault, are made again
        when all others were made once: all of them anew, until they have failed as often as a row
        may. Each time has its lines.

        Raises:
            OutputError: The file cannot be written.
            RolloutRedispatchExhausted: The fleet is down (``max_outages``).
            GymrlError: The run cannot go on.
        """
        while together := next(pending, ()) or self._next_again():
            asked = await self._asker.ask(together)
            self._journal.add(*asked.records, group=asked.group)
            again = tried_again(together, asked.records, self._options.max_tries)
            if again:
                logger.info("made again: %s", _said(asked.records[0]))
                self._again.append(again)
            elif self._observer is not None:
                for record in asked.records:
                    self._observer.row(record)
            self._watch_outages(asked.outage, asked.records[0])

    def _next_again(self) -> tuple[PendingRow, ...]:
        return self._again.popleft() if self._again else ()

    def _watch_outages(self, outage: RolloutRedispatchExhausted | None, record: RowRecord) -> None:
        if outage is None:
            self._outages = 0
            return
        self._outages += 1
        if self._outages >= self._options.max_outages:
            last = f": {said}" if (said := _said(record)) else ""
            raise RolloutRedispatchExhausted(
                f"{self._outages} rows, one after the other, failed by the fleet's fault (set by "
                f"max_outages); the run can be continued. The last one{last}",
                attempts=outage.attempts,
            ) from outage


def _said(record: RowRecord) -> str:
    return "" if record.failure is None else record.failure.message
