"""``run_evaluation``: every row of a plan to its line in a file, and what was finished stays."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec

from gymrl.benchmark.policy import PolicyServer
from gymrl.concurrency import close_within, gather_bounded
from gymrl.errors import RolloutFailure
from gymrl.evaluation.asking import CohortWatch, TaskAsker
from gymrl.evaluation.engine import completed_plan, engine_config, with_gym
from gymrl.evaluation.journal import METRICS_FILE, Journal, write_whole
from gymrl.evaluation.reading import read_evaluation
from gymrl.evaluation.report import EvaluationReport, report_evaluation
from gymrl.evaluation.running import EvaluationObserver, RowRunner
from gymrl.evaluation.servers import MergedServers, merged_servers
from gymrl.evaluation.settings import RunOptions
from gymrl.gym.listener import PortRange
from gymrl.gym.policy_key import KeyedPool, require_taken
from gymrl.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gymrl.evaluation.plan import EvaluationPlan
    from gymrl.gym.client import HttpPool

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_KEY_TIMEOUT_S = 30.0


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
    all. Attempts that are compared with each other, and failed by the fleet's fault, are made again in
    the same run. Each row's line is in ``rollouts.jsonl`` as soon as the row ends. At the end the report is
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
            runner = RowRunner(asker, journal, options, observer)
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
