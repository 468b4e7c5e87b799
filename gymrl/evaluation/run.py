"""``run_evaluation``: every row of a plan to its line in a file, and what was finished stays."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.to_thread
import msgspec

from gymrl.benchmark.policy import PolicyServer
from gymrl.concurrency import close_within, gather_bounded
from gymrl.errors import ConfigError, RolloutFailure, RolloutRedispatchExhausted
from gymrl.evaluation.asking import CohortWatch, TaskAsker
from gymrl.evaluation.engine import completed_plan, engine_config, with_gym
from gymrl.evaluation.journal import METRICS_FILE, Journal, PendingRow, write_whole
from gymrl.evaluation.reading import read_evaluation
from gymrl.evaluation.report import EvaluationReport, report_evaluation
from gymrl.evaluation.servers import MergedServers, merged_servers
from gymrl.evaluation.settings import RunOptions
from gymrl.gym.listener import PortRange
from gymrl.gym.policy_key import KeyedPool, require_taken
from gymrl.gym.shards import row_route
from gymrl.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator

    from gymrl.evaluation.plan import EvaluationPlan
    from gymrl.gym.client import HttpPool
    from gymrl.records.schema import RowRecord

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_KEY_TIMEOUT_S = 30.0


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
        """A row has ended, and its line is written."""
        ...


async def run_evaluation(
    plan: EvaluationPlan,
    output: str | Path,
    options: RunOptions | None = None,
    *,
    observer: EvaluationObserver | None = None,
    overwrite: bool = False,
    extend: bool = False,
) -> EvaluationReport:
    """Run the rows of a plan that a directory has no result of, and report on all of them.

    A new directory gets every row; one that a former run has left, for whatever reason, is
    continued: finished rows stay, rows that failed are tried again, at most ``max_tries`` times in
    all. Each row's line is in ``rollouts.jsonl`` as soon as the row ends. At the end the report is
    written to ``benchmark_metrics.json``. Runs with different directories are independent.

    Cancelling it ends what is under way; what was written stays.

    Args:
        plan: Of :func:`~gymrl.evaluation.planning.plan_evaluation`, or read from a file.
        output: The directory; made where it is missing.
        options: Where and how fast; None: the defaults.
        observer: Told of rows as they end.
        overwrite: Throw away what the directory holds of a former evaluation.
        extend: Allow the plan to have more tasks, repeats or benchmarks than the directory's.

    Raises:
        ConfigError: The directory is another evaluation's (the differences are named) or is being
            written by another process, there is no policy, or a setting cannot work.
        RowError: A row cannot be asked, or names a server that is not there.
        OutputError: The file cannot be written.
        RolloutRedispatchExhausted: ``max_outages`` rows, one after the other, failed by the fleet's
            fault.
        GymrlError: A process died for good, or did not start. Whichever of these it is, the run
            can be continued.
    """
    chosen = options or RunOptions()
    completed = await anyio.to_thread.run_sync(completed_plan, plan, chosen)
    merged = MergedServers({}, {})
    if chosen.registry_url is None:
        merged = merged_servers(completed)
    chosen = await anyio.to_thread.run_sync(with_gym, completed, chosen)
    directory = Path(output)
    journal = Journal(directory, completed, overwrite=overwrite, extend=extend)
    with contextlib.closing(journal):
        await anyio.to_thread.run_sync(journal.open)
        count = sum(len(rows) for rows in journal.pending(chosen.max_tries))
        if observer is not None:
            observer.begin(completed, journal.num_finished, count)
        if count:
            await _run_pending(journal, chosen, merged, observer)
        return await anyio.to_thread.run_sync(_reported, directory)


def _reported(directory: Path) -> EvaluationReport:
    report = report_evaluation(read_evaluation(directory))
    write_whole(directory / METRICS_FILE, report.to_json().encode())
    return report


async def _run_pending(
    journal: Journal,
    options: RunOptions,
    merged: MergedServers,
    observer: EvaluationObserver | None,
) -> None:
    # It would tell of a run that is no longer the last one.
    (journal.directory / METRICS_FILE).unlink(missing_ok=True)
    async with _authenticated(options) as reachable:
        config = await anyio.to_thread.run_sync(
            engine_config, journal.plan, reachable, merged.servers, abandon_on_cancel=True
        )
        watch = CohortWatch()
        async with RolloutEngine(config, observer=watch) as engine:
            asker = TaskAsker(engine, watch, journal.plan.settings, merged.renamed)
            runner = _Runner(asker, journal, options, observer)
            runner.check_routes(engine.routes)
            if observer is not None:
                observer.started()
            pending = journal.pending(options.max_tries)
            together = max(each.group_size for each in journal.plan.benchmarks)
            at_a_time = max(1, options.concurrency // together)
            await gather_bounded(lambda _: runner.work(pending), range(at_a_time))


@contextlib.asynccontextmanager
async def _authenticated(options: RunOptions) -> AsyncIterator[RunOptions]:
    """The options with policy servers that need no key: a relay of this process has it."""
    if options.api_key is None or not options.base_urls:
        yield options
        return
    async with KeyedPool(options.api_key) as pool:
        await gather_bounded(lambda url: _check_key(pool, url), options.base_urls)
        relay = PolicyServer(options.base_urls, pool, PortRange())
        await relay.start()
        try:
            yield msgspec.structs.replace(options, base_urls=(relay.base_url,), api_key=None)
        finally:
            await close_within(relay.stop(), _STOP_TIMEOUT_S, "the policy's relay")


async def _check_key(pool: HttpPool, base_url: str) -> None:
    url = f"{base_url.rstrip('/')}/models"
    with anyio.move_on_after(_KEY_TIMEOUT_S):
        try:
            answer = await pool.get(url)
        except RolloutFailure as error:
            logger.debug("%s was not asked whether it takes the key: %s", url, error.message)
        else:
            require_taken(answer, "the key (api_key) is not one it takes", "api_key")


class _Runner:
    """Takes rows through the engine and writes what becomes of them."""

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
        """Run rows until there are no more; several of these share the iterator."""
        for together in pending:
            asked = await self._asker.ask(together)
            self._journal.add(*asked.records, group=asked.group)
            if self._observer is not None:
                for record in asked.records:
                    self._observer.row(record)
            self._watch_outages(asked.outage, asked.records[0])

    def _watch_outages(self, outage: RolloutRedispatchExhausted | None, record: RowRecord) -> None:
        if outage is None:
            self._outages = 0
            return
        self._outages += 1
        if self._outages >= self._options.max_outages:
            last = "" if record.failure is None else f": {record.failure.message}"
            raise RolloutRedispatchExhausted(
                f"{self._outages} rows, one after the other, failed by the fleet's fault (set by "
                f"max_outages); the run can be continued. The last one{last}",
                attempts=outage.attempts,
            ) from outage
