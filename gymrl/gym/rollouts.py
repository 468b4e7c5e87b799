"""Many rows at once: each to its outcome, the outcomes as one stream."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from gymrl.concurrency import OwnedTasks
from gymrl.gym.client import GymClient, failure_of
from gymrl.gym.episode import DecodeFunction, EpisodeOptions, read_episode
from gymrl.gym.materialized import TASKSET_ROUTE, agents_answer, episode_body
from gymrl.gym.row_images import body_with_images
from gymrl.telemetry import Timer
from gymrl.types import Failure, RowResult, Trajectory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from anyio.streams.memory import MemoryObjectReceiveStream

    from gymrl.gym.ledger import LedgerClient
    from gymrl.gym.registry import RouteTable
    from gymrl.gym.row_images import ImageReader, RowImages
    from gymrl.token_ledger import LedgerFrame
    from gymrl.types import Row

logger = logging.getLogger(__name__)

INLINE_BYTES = 128 << 10
"""Larger answers are read in a thread. Reading this much takes about a millisecond."""

PROGRESS_INTERVAL_S = 30.0


class RowServer:
    """Takes rows to their outcomes.

    Args:
        client: Posts them.
        table: Says where.
        options: How answers are read.
        decode: Fills texts; None leaves them out.
        max_connections: Rows under way at a time; 0: no limit. A row's deadline begins when its
            turn comes, not while it waits for it.
        ledgers: The policy's ledgers, where trajectories need them.
        images: Reads the rows' images; None: they are left alone.
    """

    def __init__(  # noqa: PLR0913 - the parts of a worker that a row passes
        self,
        client: GymClient,
        table: RouteTable,
        options: EpisodeOptions,
        decode: DecodeFunction | None,
        max_connections: int = 0,
        ledgers: LedgerClient | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self._client = client
        self._table = table
        self._options = options
        self._decode = decode
        self._ledgers = ledgers
        self._images = images
        self._slots = anyio.CapacityLimiter(max_connections) if max_connections else None
        # Reading holds the interpreter most of the time: more threads would not read faster, they
        # would only take more turns from the event loop.
        self._readers = anyio.CapacityLimiter(1)

    def agent_of(self, row: Row) -> str:
        """The agent that serves a row; its route as it stands where that is unknown."""
        return self._table.agent_of(row.route) if row.route in self._table.routes else row.route

    async def serve(self, row: Row, timer: Timer) -> RowResult:
        """One row's outcome. Only cancellation gets out of here as an exception."""
        agent = self.agent_of(row)
        outcome: Trajectory | Failure
        try:
            outcome = await self._outcome(row, agent, timer)
        except Exception as error:  # noqa: BLE001 - the failure is the result, with its traceback
            outcome = failure_of(error, row=row.index, agent=agent)
        return RowResult(index=row.index, agent=agent, outcome=outcome)

    async def _outcome(self, row: Row, agent: str, timer: Timer) -> Trajectory:
        images: RowImages | None = None
        unread = len(row.media) if self._images is None else 0
        if self._images is not None:
            with timer.span("read_images"):
                images = await self._images.open_row(row)
            row = msgspec.structs.replace(row, body=images.body, media={})
        elif row.media:
            row = msgspec.structs.replace(row, body=await body_with_images(row), media={})
        is_episode = row.route.startswith(TASKSET_ROUTE)
        if is_episode:
            row = msgspec.structs.replace(row, body=episode_body(row.body, row.rollout_id))
        body, frame = await self._answer(row, agent, timer)
        read = partial(
            _read_answer,
            body,
            is_episode,
            agent=agent,
            row=row.index,
            options=self._options,
            decode=self._decode,
            ledger=frame,
            images=None if images is None else images.bins,
        )
        if len(body) <= INLINE_BYTES:
            with timer.span("postprocess_results"):
                trajectory = read()
        else:
            trajectory = await anyio.to_thread.run_sync(_timed(read, timer), limiter=self._readers)
        if images is None:
            return _noting_unread(trajectory, unread)
        with timer.span("read_images"):
            held = {} if frame is None else frame.media
            return await images.attach(trajectory, row.index, held)

    async def _answer(self, row: Row, agent: str, timer: Timer) -> tuple[bytes, LedgerFrame | None]:
        """The answer's body, and what the policy server says it served where that is asked for."""
        if self._ledgers is None:
            return await self._run(row, agent, timer), None
        async with self._ledgers.rollout(row.rollout_id) as ledger:
            body = await self._run(row, agent, timer)
            with timer.span("take_ledger"):
                return body, await ledger.take()

    async def _run(self, row: Row, agent: str, timer: Timer) -> bytes:
        url = self._table.run_url(row.route)
        if self._slots is None:
            return await self._client.run(url, row, agent)
        waiting_since = time.perf_counter()
        async with self._slots:
            timer.add("wait_for_connection", time.perf_counter() - waiting_since)
            return await self._client.run(url, row, agent)


def _read_answer(body: bytes, is_episode: bool, **known: Any) -> Trajectory:
    return read_episode(agents_answer(body) if is_episode else body, **known)


def _noting_unread(trajectory: Trajectory, unread: int) -> Trajectory:
    """Say that the model was shown images that the trajectory does not have."""
    if not unread:
        return trajectory
    notes = {**trajectory.notes, "images_not_read": unread}
    return msgspec.structs.replace(trajectory, notes=notes)


def _timed(read: partial[Trajectory], timer: Timer) -> partial[Trajectory]:
    def run() -> Trajectory:
        with timer.span("postprocess_results"):
            return read()

    return partial(run)


async def stream_rows(
    server: RowServer,
    rows: Sequence[Row],
    timer_prefix: str,
    progress_interval_s: float = PROGRESS_INTERVAL_S,
) -> AsyncGenerator[RowResult, None]:
    """Outcomes in the order of completion; the last one carries the timings.

    Timings, in seconds: ``total`` (the whole call), ``run_rollouts`` (until the last row was
    there), ``await_results`` (waiting for rows), ``postprocess_results`` (reading answers, summed
    over rows), ``wait_for_connection`` (rows waiting for their turn, summed), ``read_images`` (where
    images are read, summed) and
    ``postprocess_results_pct`` (reading's share of the total, in percent).

    Closing the generator cancels the rows that are under way and waits for their end.
    """
    if not rows:
        return
    started = time.perf_counter()
    timer = Timer()
    for name in ("await_results", "postprocess_results", "wait_for_connection"):
        timer.add(name, 0.0)
    send, receive = anyio.create_memory_object_stream[RowResult](math.inf)
    errors: list[BaseException] = []

    def fail(error: BaseException) -> None:
        errors.append(error)
        send.close()

    tasks = OwnedTasks("rollouts", on_error=fail)

    async def one(row: Row) -> None:
        send.send_nowait(await server.serve(row, timer))

    waiting = Counter(server.agent_of(row) for row in rows)
    try:
        progress = _report_progress(waiting, len(rows), progress_interval_s)
        _ = tasks.start(progress, "progress")
        for row in rows:
            _ = tasks.start(one(row), f"row {row.index}")
        for remaining in range(len(rows) - 1, -1, -1):
            with timer.span("await_results"):
                result = await _next(receive)
            waiting[result.agent] -= 1
            if not remaining:
                result = msgspec.structs.replace(
                    result, timings=_timings(timer, started, timer_prefix)
                )
            yield result
    except anyio.EndOfStream:
        raise errors[0] from None
    finally:
        send.close()
        receive.close()
        with anyio.CancelScope(shield=True):
            await tasks.close()


async def _next(results: MemoryObjectReceiveStream[RowResult]) -> RowResult:
    """The next result; those that are there are handed on without a turn of the loop for each.

    A turn of a busy loop takes as long as hundreds of rows: results would wait until all rows had
    run.
    """
    try:
        return results.receive_nowait()
    except anyio.WouldBlock:
        return await results.receive()


def _timings(timer: Timer, started: float, prefix: str) -> dict[str, float]:
    total = time.perf_counter() - started
    seconds = timer.seconds() | {"total": total, "run_rollouts": total}
    share = 100.0 * seconds["postprocess_results"] / total if total else 0.0
    seconds["postprocess_results_pct"] = share
    return {f"{prefix.rstrip('/')}/{name}": value for name, value in seconds.items()}


async def _report_progress(waiting: Counter[str], count: int, interval_s: float) -> None:
    """Say now and then which agents the call still waits for, the slowest first."""
    started = time.perf_counter()
    while True:
        await anyio.sleep(interval_s)
        slowest = ", ".join(f"{agent}: {n}" for agent, n in waiting.most_common(3) if n > 0)
        logger.info(
            "%d of %d rows after %.0f s; waiting for %s",
            count - waiting.total(),
            count,
            time.perf_counter() - started,
            slowest,
        )
