"""One batch on its way: dispatched, merged, put back into groups, scored."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from typing import TYPE_CHECKING

import anyio
import msgspec

from gymrl.errors import DeadlineExceeded, RolloutStreamError
from gymrl.gym.shards import bucket_rows
from gymrl.rollout.groups import CompletedGroup, GroupAccumulator, name_rows
from gymrl.rollout.merge import StreamMerge, Tagged
from gymrl.rollout.prepare import next_attempt
from gymrl.rollout.retry import Attempts, ends_run, located, run_error
from gymrl.rollout.timing import TIMER_PREFIX, merge_timings
from gymrl.scoring import GroupStats, ScoredGroup, score
from gymrl.types import Failure, RolloutGroup, Row, RowResult

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from gymrl.actors import ActorHandle
    from gymrl.config import RolloutConfig
    from gymrl.gym.shards import ShardSet
    from gymrl.rollout.prepare import GroupSizes
    from gymrl.rollout.progress import Progress, RolloutObserver
    from gymrl.scoring import Scoring, ScoringWarning

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What all batches of an engine share.

    Attributes:
        config: Policies, budgets and the watchdog's deadline.
        shards: Who serves what.
        progress: Counted in.
        observer: Told of rows and groups.
        warned: Warnings of the scoring that were logged already; each is logged once.
    """

    config: RolloutConfig
    shards: ShardSet[ActorHandle]
    progress: Progress
    observer: RolloutObserver | None = None
    warned: set[ScoringWarning] = dataclasses.field(default_factory=set)


class Batch:
    """The state of one batch; iterate :meth:`groups` once.

    Args:
        run: What it shares with others.
        rows: As prepared.
        sizes: How they hang together.
        scoring: Applied to each whole group.
    """

    def __init__(self, run: Run, rows: Sequence[Row], sizes: GroupSizes, scoring: Scoring) -> None:
        self._run = run
        self._rows = tuple(rows)
        self._latest = list(rows)  # each row as last dispatched
        self._sizes = sizes
        self._scoring = scoring
        self._groups = GroupAccumulator(
            rows, sizes.group, allow_mixed_agents=sizes.returns_entire_batch
        )
        self._merge: StreamMerge[RowResult] = StreamMerge()
        self._attempts = Attempts(run.config.max_infra_attempts, run.config.max_data_attempts)
        self._at: dict[int, str] = {}
        self._timings: dict[str, dict[str, float]] = {}
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
        progress = self._run.progress
        progress.rows += len(self._rows)
        progress.groups += self._groups.num_groups
        self._started = time.perf_counter()
        try:
            for bucket in bucket_rows(self._rows, self._run.shards, self._sizes.routing_size):
                self._dispatch(bucket.label, bucket.handle, bucket.rows)
            while (tagged := await self._next()) is not None:
                completed = self._take(tagged)
                group = self._finish(completed) if completed is not None else None
                if group is not None:
                    progress.groups_done += 1
                    yield group
            self._groups.finish(self._whose_are(self._groups.missing))
        finally:
            await self._merge.aclose()

    async def close(self) -> None:
        """End everything in flight; a consumer that still reads gets an error."""
        await self._merge.aclose()

    def _dispatch(
        self, label: str, handle: ActorHandle, rows: list[Row], delay_s: float = 0.0
    ) -> None:
        self._at.update((row.index, label) for row in rows)
        self._merge.add(label, _rows_from(handle, rows, delay_s))

    async def _next(self) -> Tagged[RowResult] | None:
        """The next row of any instance; None when all streams have ended."""
        seconds = self._run.config.no_progress_timeout_s
        with anyio.move_on_after(seconds):
            return await anext(self._merge, None)
        missing = self._groups.missing
        raise DeadlineExceeded(
            f"no row arrived for {seconds:g} s (set by no_progress_timeout_s); waiting for "
            f"{self._whose_are(missing)}",
            what=name_rows(missing),
            seconds=seconds,
            setting="no_progress_timeout_s",
        )

    def _whose_are(self, indices: Sequence[int]) -> str:
        """Rows by the instance that has them, as an error names them."""
        by_label: dict[str, list[int]] = {}
        for index in indices:
            by_label.setdefault(self._at[index], []).append(index)
        return "; ".join(f"{name_rows(rows)} at {label!r}" for label, rows in by_label.items())

    def _take(self, tagged: Tagged[RowResult]) -> CompletedGroup | None:
        label, result = tagged
        try:
            index = self._groups.checked_index(result.index)
            if result.timings is not None:
                self._keep_timings(label, result.timings)
            if isinstance(result.outcome, Failure):
                settled = self._settle(index, label, result.agent, result.outcome)
                if settled is None:
                    return None
                result = msgspec.structs.replace(result, outcome=settled)
            completed = self._groups.add(result)
        except RolloutStreamError as error:
            if error.instance is not None:
                raise
            raise type(error)(
                f"instance {label!r}: {error}", **{**error.fields, "instance": label}
            ) from None
        self._count(result, label)
        return completed

    def _keep_timings(self, label: str, timings: dict[str, float]) -> None:
        # An instance that got a row a second time reports again; its slowest call counts.
        kept = self._timings.setdefault(label, {})
        for name, value in timings.items():
            kept[name] = max(value, kept.get(name, value))

    def _settle(self, index: int, label: str, agent: str, failure: Failure) -> Failure | None:
        """Dispatch the row again (None), or the failure as it stays in its group."""
        row = self._rows[index]
        attempts = self._attempts.of(index)
        failure = located(failure, index, agent or row.route, label, attempts)
        delay_s = self._attempts.delay_before_next(index, failure)
        if delay_s is not None:
            self._run.progress.redispatches += 1
            again = self._latest[index] = next_attempt(row, attempts)
            self._dispatch(*self._next_place(row, label), [again], delay_s)
            return None
        if ends_run(failure, self._run.config.failure_policy):
            raise run_error(failure)
        return failure

    def _next_place(self, row: Row, label: str) -> tuple[str, ActorHandle]:
        """Another replica for a row that stands alone; a group's row must stay with its group."""
        shard = self._run.shards.shard_of(row.route, row.index)
        if self._sizes.routing_size == 1:
            return shard.next_instance(avoid=label)
        return label, dict(shard.instances)[label]

    def _count(self, result: RowResult, label: str) -> None:
        progress = self._run.progress
        if isinstance(result.outcome, Failure):
            progress.rows_failed += 1
            name = result.outcome.error
            progress.failures[name] = progress.failures.get(name, 0) + 1
        else:
            progress.rows_done += 1
            progress.tokens_generated += result.outcome.num_generated
        if self._run.observer is not None:
            self._run.observer.on_row(result, label)

    def _finish(self, completed: CompletedGroup) -> RolloutGroup | None:
        """Score a whole group; None when the policy leaves it out."""
        timings = None
        if self._groups.is_complete:
            timings = merge_timings(self._timings)
            timings.setdefault(f"{TIMER_PREFIX}/total", time.perf_counter() - self._started)
            self._run.progress.timings = timings
        group = RolloutGroup(
            index=completed.index,
            task_index=completed.rows[0].task_index,
            rows=tuple(self._latest[row.index] for row in completed.rows),
            samples=tuple(result.outcome for result in completed.results),
            timings=timings,
        )
        if group.failures and self._run.config.failure_policy == "drop_group":
            self._run.progress.groups_dropped += 1
            return None
        scored = self._score_prompts(group)
        if self._run.observer is not None:
            self._run.observer.on_group(scored.group, scored.stats)
        return scored.group

    def _score_prompts(self, group: RolloutGroup) -> ScoredGroup:
        """Score prompt by prompt: a group that is the whole batch may hold several."""
        size = self._sizes.identity_size
        places = range(len(group.rows))
        prompts = [
            list(run) for _, run in itertools.groupby(places, lambda n: group.rows[n].index // size)
        ]
        if len(prompts) == 1:
            return self._score(group)
        parts = [
            self._score(
                msgspec.structs.replace(
                    group,
                    rows=tuple(group.rows[place] for place in prompt),
                    samples=tuple(group.samples[place] for place in prompt),
                )
            )
            for prompt in prompts
        ]
        stats = GroupStats.merged(part.stats for part in parts)
        samples = tuple(sample for part in parts for sample in part.group.samples)
        scored = msgspec.structs.replace(group, samples=samples, metrics=stats.scalars())
        return ScoredGroup(group=scored, stats=stats)

    def _score(self, group: RolloutGroup) -> ScoredGroup:
        """Score the attempts at one prompt, and log what is to be heard."""
        scored = score(group, self._scoring)
        for warning in scored.warnings:
            if warning not in self._run.warned:
                self._run.warned.add(warning)
                logger.warning("agent %s: %s", warning.agent, warning.message)
        if scored.length_report is not None:
            for line in scored.length_report.lines():
                logger.info("group %d: %s", group.index, line)
        return scored


async def _rows_from(
    handle: ActorHandle, rows: list[Row], delay_s: float
) -> AsyncIterator[RowResult]:
    if delay_s > 0:
        await anyio.sleep(delay_s)
    stream = handle.stream("run_rollouts", rows, TIMER_PREFIX)
    try:
        async for result in stream:
            yield result
    finally:
        with anyio.CancelScope(shield=True):
            await stream.aclose()
