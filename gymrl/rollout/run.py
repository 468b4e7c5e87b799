"""One batch on its way: dispatched, merged, put back into groups, scored."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import logging
import time
from typing import TYPE_CHECKING

import anyio
import msgspec

from gymrl.errors import (
    ActorDiedError,
    ActorStreamError,
    DeadlineExceeded,
    RolloutStreamError,
    RowIndexValueError,
)
from gymrl.gym.shards import route_groups
from gymrl.rollout.deadlines import Deadlines
from gymrl.rollout.dispatch import Dispatch, Dispatcher
from gymrl.rollout.groups import CompletedGroup, GroupAccumulator, name_rows
from gymrl.rollout.merge import Ended, StreamMerge, Tagged, stream_failure
from gymrl.rollout.prepare import next_attempt
from gymrl.rollout.progress import Progress
from gymrl.rollout.prompts import GroupScorer
from gymrl.rollout.retry import (
    Attempts,
    death_failure,
    ends_run,
    located,
    poison_failure,
    rejection,
    run_error,
    timeout_failure,
)
from gymrl.rollout.timing import TIMER_PREFIX, merge_timings
from gymrl.types import Failure, RolloutGroup, Row, RowResult

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from gymrl.config import RolloutConfig
    from gymrl.gym.shards import ShardSet
    from gymrl.rollout.instance import Instance
    from gymrl.rollout.prepare import GroupSizes
    from gymrl.rollout.progress import RolloutObserver
    from gymrl.scoring import Scoring, ScoringWarning

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What all batches of an engine share.

    Attributes:
        config: Policies, budgets and deadlines.
        shards: Who serves what.
        progress: Counted in, beside the batch's own.
        observer: Told of rows and groups.
        accept: Asked of each trajectory; False rejects it.
        warned: Warnings of the scoring that were logged already; each is logged once.
    """

    config: RolloutConfig
    shards: ShardSet[Instance]
    progress: Progress
    observer: RolloutObserver | None = None
    accept: Callable[[RowResult], bool] | None = None
    warned: set[ScoringWarning] = dataclasses.field(default_factory=set)


class Batch:
    """The state of one batch; iterate :meth:`groups` once.

    Args:
        run: What it shares with others.
        rows: As prepared.
        sizes: How they hang together.
        scoring: Applied to each whole group.

    Attributes:
        progress: Counters of this batch alone.

    Raises:
        RowValueError: Rows of one group are no attempts at one prompt, or rows that must stay
            together go to several routes.
    """

    def __init__(self, run: Run, rows: Sequence[Row], sizes: GroupSizes, scoring: Scoring) -> None:
        route_groups(rows, run.shards, sizes.routing_size)  # refuses now what can't be dispatched
        self.progress = Progress()
        self._run = run
        self._counted = (run.progress, self.progress)
        self._rows = tuple(rows)
        self._latest = list(rows)  # each row as last dispatched
        self._scorer = GroupScorer(scoring, sizes.identity_size, run.warned)
        self._groups = GroupAccumulator(
            rows, sizes.group, allow_mixed_agents=sizes.returns_entire_batch
        )
        self._merge: StreamMerge[Dispatch, RowResult] = StreamMerge()
        self._dispatcher = Dispatcher(
            self._merge,
            run.shards,
            sizes.routing_size,
            [progress.media for progress in self._counted],
        )
        self._attempts = Attempts(
            run.config.max_infra_attempts, run.config.max_data_attempts, run.config.retry_delay_s
        )
        self._deadlines = Deadlines(None, None)
        self._completed: collections.deque[CompletedGroup] = collections.deque()
        self._timings: dict[str, dict[str, float]] = {}
        self._has_given_up = False  # on rows that still run
        self._started = time.perf_counter()

    async def groups(self) -> AsyncGenerator[RolloutGroup, None]:
        """Groups in completion order, scored; leaving early ends everything in flight.

        Raises:
            RolloutStreamError: An instance failed or broke the stream's rules, or a row failed
                under the policy ``raise``.
            RolloutRedispatchExhausted: A row spent its infra budget.
            IncompleteStreamError: Rows are missing at the end.
            DeadlineExceeded: Nothing arrived for `no_progress_timeout_s`.
        """
        config = self._run.config
        for progress in self._counted:
            progress.rows += len(self._rows)
            progress.groups += self._groups.num_groups
        self._started = time.perf_counter()
        self._deadlines = Deadlines(config.group_timeout_s, config.no_progress_timeout_s)
        instances = [instance for _, instance in self._run.shards.instances]
        for instance in instances:
            instance.when_lost(self._merge.fail)
        try:
            self._dispatcher.start(self._rows)
            while await self._advance():
                while self._completed:
                    group = self._finish(self._completed.popleft())
                    if group is not None:
                        for progress in self._counted:
                            progress.groups_done += 1
                        yield group
            self._groups.finish(self._dispatcher.whose_are(self._groups.missing))
        finally:
            for instance in instances:
                instance.forget(self._merge.fail)
            await self._merge.aclose()

    async def close(self) -> None:
        """End everything in flight; a consumer that still reads gets an error."""
        await self._merge.aclose()

    async def _advance(self) -> bool:
        """Wait for the next whole group, or for a deadline; False when nothing more will come."""
        self._deadlines.waits()
        while not self._completed:
            if self._has_given_up:
                return False
            with anyio.move_on_after(self._deadlines.next_in()):
                event = await self._merge.next_event()
                if event is None:
                    return False
                if isinstance(event, Ended):
                    self._stream_ended(event.label, event.error)
                else:
                    self._deadlines.arrived()
                    self._take(event)
                continue
            if self._deadlines.groups_are_late():
                self._end_late_groups()
            elif self._deadlines.is_silent():
                raise self._silence()
        return True

    def _silence(self) -> DeadlineExceeded:
        seconds = self._run.config.no_progress_timeout_s or 0.0
        missing = self._groups.missing
        return DeadlineExceeded(
            f"no row arrived for {seconds:g} s (set by no_progress_timeout_s); waiting for "
            f"{self._dispatcher.whose_are(missing)}",
            what=name_rows(missing),
            seconds=seconds,
            setting="no_progress_timeout_s",
        )

    # --- what arrives ----------------------------------------------------------------------------

    def _take(self, tagged: Tagged[Dispatch, RowResult]) -> None:
        dispatch, result = tagged
        label = dispatch.label
        try:
            index = self._groups.checked_index(result.index)
            if dispatch.waiting.pop(index, None) is None:
                raise RowIndexValueError(f"row {index} arrived, but was not asked for", row=index)
            if result.timings is not None:
                self._keep_timings(label, result.timings)
            settled = self._settle(index, label, result)
            if settled is not None:
                self._add(settled, label)
        except RolloutStreamError as error:
            if error.instance is not None:
                raise
            raise type(error)(
                f"instance {label!r}: {error}", **{**error.fields, "instance": label}
            ) from None
        if not isinstance(result.outcome, Failure):
            dispatch.instance.succeeded()

    def _keep_timings(self, label: str, timings: dict[str, float]) -> None:
        # An instance that got a row a second time reports again; its slowest call counts.
        kept = self._timings.setdefault(label, {})
        for name, value in timings.items():
            kept[name] = max(value, kept.get(name, value))

    def _settle(self, index: int, label: str, result: RowResult) -> RowResult | None:
        """The result as it stays in its group, or None when the row was dispatched again."""
        row = self._rows[index]
        agent = result.agent or row.route
        outcome = result.outcome
        if not isinstance(outcome, Failure):
            if self._is_accepted(result):
                return result
            outcome = located(rejection(index), index, agent, label, self._attempts.of(index))
            return msgspec.structs.replace(result, outcome=outcome)
        failure = located(outcome, index, agent, label, self._attempts.of(index))
        delay_s = self._attempts.delay_before_next(index, failure)
        if delay_s is not None:
            self._dispatcher.again(self._next_attempt(row), delay_s)
            return None
        return msgspec.structs.replace(result, outcome=self._last_word(failure))

    def _is_accepted(self, result: RowResult) -> bool:
        if self._run.accept is None:
            return True
        verdict: object = self._run.accept(result)
        if verdict is None or inspect.isawaitable(verdict):
            if inspect.iscoroutine(verdict):
                verdict.close()
            raise TypeError(
                f"accept returned {verdict!r} for row {result.index}: it must say True or False, "
                "at once"
            )
        return bool(verdict)

    def _next_attempt(self, row: Row) -> Row:
        for progress in self._counted:
            progress.redispatches += 1
        again = next_attempt(row, self._attempts.of(row.index) - 1)
        self._latest[row.index] = again
        return again

    def _last_word(self, failure: Failure, *, is_exhausted: bool = True) -> Failure:
        """The failure that stays in its group, unless it ends the run."""
        if ends_run(failure, self._run.config.failure_policy):
            raise run_error(failure, is_exhausted=is_exhausted)
        return failure

    def _add(self, result: RowResult, label: str) -> None:
        completed = self._groups.add(result)
        for progress in self._counted:
            if isinstance(result.outcome, Failure):
                progress.add_failure(result.outcome.error, result.agent)
            else:
                progress.rows_done += 1
                progress.tokens_generated += result.outcome.num_generated
        if self._run.observer is not None:
            self._run.observer.on_row(result, label)
        if completed is not None:
            self._completed.append(completed)

    def _add_failure(self, failure: Failure, row: Row, *, is_exhausted: bool = True) -> None:
        """Settle a row whose failure the driver has found."""
        index = row.index
        label = self._dispatcher.label_of(index)
        failure = located(failure, index, row.route, label, self._attempts.of(index))
        failure = self._last_word(failure, is_exhausted=is_exhausted)
        self._add(RowResult(index=index, agent=row.route, outcome=failure), label)

    # --- what goes wrong -------------------------------------------------------------------------

    def _stream_ended(self, dispatch: Dispatch, error: BaseException | None) -> None:
        """Go on after the end of a stream, or raise what ends the run."""
        self._dispatcher.ended(dispatch)
        if error is None or not dispatch.waiting:
            return  # rows that a stream left out are named at the end
        if isinstance(error, RolloutStreamError):
            raise error
        is_death = isinstance(error, ActorDiedError | ActorStreamError)
        if not is_death or dispatch.instance.is_lost:
            raise stream_failure(dispatch.label, error)
        self._after_death(dispatch, error)

    def _after_death(self, dispatch: Dispatch, error: BaseException) -> None:
        """Each row under way has failed by the fleet's fault; a row that is to blame, by its own."""
        logger.warning("instance %r had %s under way", dispatch.label, name_rows(dispatch.waiting))
        again: list[Row] = []
        longest_s = 0.0
        for index in list(dispatch.waiting):
            row = self._rows[index]
            deaths = self._dispatcher.add_death(index)
            if self._dispatcher.is_poison(dispatch):
                self._add_failure(poison_failure(index, deaths, error), row)
                continue
            failure = death_failure(error)
            delay_s = self._attempts.delay_before_next(index, failure)
            if delay_s is None:
                self._add_failure(failure, row)
                continue
            again.append(self._next_attempt(row))
            longest_s = max(longest_s, delay_s)
        if again:
            self._dispatcher.after_death(dispatch, again, longest_s)

    def _end_late_groups(self) -> None:
        """The groups' deadline has passed: settle every row that has not come."""
        seconds = self._run.config.group_timeout_s or 0.0
        missing = self._groups.missing
        self._has_given_up = True
        logger.warning(
            "after %g s (group_timeout_s) these have not come: %s",
            seconds,
            self._dispatcher.whose_are(missing),
        )
        for index in missing:
            failure = timeout_failure(index, "its group did not end", seconds, "group_timeout_s")
            self._add_failure(failure, self._rows[index], is_exhausted=False)

    # --- what leaves -----------------------------------------------------------------------------

    def _finish(self, completed: CompletedGroup) -> RolloutGroup | None:
        """Score a whole group; None when the policy leaves it out."""
        timings = None
        if self._groups.is_complete and not self._completed:
            timings = merge_timings(self._timings)
            timings.setdefault(f"{TIMER_PREFIX}/total", time.perf_counter() - self._started)
            for progress in self._counted:
                progress.timings = timings
        group = RolloutGroup(
            index=completed.index,
            task_index=completed.rows[0].task_index,
            rows=tuple(self._latest[row.index] for row in completed.rows),
            samples=tuple(result.outcome for result in completed.results),
            timings=timings,
        )
        if group.failures and self._run.config.failure_policy == "drop_group":
            for progress in self._counted:
                progress.groups_dropped += 1
            return None
        scored = self._scorer.score(group)
        if self._run.observer is not None:
            self._run.observer.on_group(scored.group, scored.stats)
        return scored.group
