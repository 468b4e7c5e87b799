"""Rollouts for code without an event loop: the engine runs in a loop of its own, in a thread."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.from_thread import start_blocking_portal

from gymrl.concurrency import refuse_running_loop
from gymrl.errors import RolloutStreamError
from gymrl.rollout.engine import RolloutEngine
from gymrl.types import RolloutGroup

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import TracebackType

    from anyio.from_thread import BlockingPortal

    from gymrl.config import RolloutConfig, SamplingParams
    from gymrl.generation.weights import PauseMode, WeightSource
    from gymrl.rollout.engine import RolloutStream
    from gymrl.rollout.progress import Progress


def collect(
    config: RolloutConfig,
    rows: Sequence[dict[str, Any]],
    *,
    num_generations: int = 1,
    sampling: SamplingParams | None = None,
) -> list[RolloutGroup]:
    """Start an engine, run the rows, end it; groups in the order of `rows`.

    For several calls use :class:`SyncRolloutEngine`, which starts its processes once.

    Raises:
        RuntimeError: Called where an event loop runs; use :class:`RolloutEngine` there.
        GymrlError: What starting and running raise.
    """
    with SyncRolloutEngine(config) as engine:
        return engine.run(rows, num_generations=num_generations, sampling=sampling)


class SyncRolloutStream(Iterator[RolloutGroup]):
    """The groups of one batch, for a plain loop; see :class:`RolloutStream`.

    Attributes:
        progress: Counters of this stream alone; read them from any thread.
    """

    def __init__(self, progress: Progress, groups: Generator[RolloutGroup, None, None]) -> None:
        self.progress = progress
        self._groups = groups

    def __next__(self) -> RolloutGroup:
        return next(self._groups)

    def close(self) -> None:
        """End what is in flight, and wait for that. Safe to call twice."""
        self._groups.close()


class SyncRolloutEngine:
    """A :class:`RolloutEngine` for blocking code.

    ::

        with SyncRolloutEngine(config) as engine:
            for group in engine.stream(rows, num_generations=8):
                train_on(group)

    Several threads may use it at once. Ctrl-C in a blocked call ends what that call had in flight.

    Args:
        config: As for :class:`RolloutEngine`.
        **options: The engine's further keywords.
    """

    def __init__(self, config: RolloutConfig, **options: Any) -> None:
        self._engine = RolloutEngine(config, **options)
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> Self:
        """Start the loop and the engine.

        Raises:
            RuntimeError: An event loop runs in this thread, or the engine is open already.
        """
        refuse_running_loop("RolloutEngine with `async with`")
        if self._stack is not None:
            raise RuntimeError("the engine is open already")
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("asyncio"))
            stack.enter_context(self._portal.wrap_async_context_manager(self._engine))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(kind, error, traceback)

    @property
    def progress(self) -> Progress:
        """The engine's counters; read them from any thread."""
        return self._engine.progress

    def stream(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        num_generations: int = 1,
        sampling: SamplingParams | None = None,
        training: bool = True,
    ) -> SyncRolloutStream:
        """Groups in completion order; see :meth:`RolloutEngine.stream`.

        Leaving the loop early ends everything in flight when the iterator is closed or collected.
        """
        self._require_open()
        start = functools.partial(
            self._engine.stream,
            rows,
            num_generations=num_generations,
            sampling=sampling,
            training=training,
        )
        stream = self._portal.call(start)
        return SyncRolloutStream(stream.progress, self._iterate(stream))

    def _iterate(self, stream: RolloutStream) -> Generator[RolloutGroup, None, None]:
        portal = self._portal
        try:
            while (group := self._next(portal, stream)) is not None:
                yield group
        finally:
            # An engine that was left meanwhile has ended the stream itself.
            if self._is_open(portal):
                portal.call(_close, stream)

    def _is_open(self, portal: BlockingPortal) -> bool:
        return self._stack is not None and self._portal is portal

    def _next(self, portal: BlockingPortal, stream: RolloutStream) -> RolloutGroup | None:
        """The next group; Ctrl-C while waiting ends the stream before it is raised."""
        if not self._is_open(portal):
            raise RolloutStreamError("the engine was left before its stream was read to the end")
        scope = self._portal.call(anyio.CancelScope)
        future = self._portal.start_task_soon(_next_of, stream, scope)
        try:
            group: RolloutGroup | None = future.result()
            return group
        finally:
            if not future.done():
                self._portal.call(scope.cancel)
                concurrent.futures.wait([future])

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        num_generations: int = 1,
        sampling: SamplingParams | None = None,
        training: bool = True,
    ) -> list[RolloutGroup]:
        """All groups in the order of `rows`; see :meth:`RolloutEngine.run`."""
        groups = self.stream(
            rows, num_generations=num_generations, sampling=sampling, training=training
        )
        return sorted(groups, key=lambda group: group.index)

    def update_weights(self, source: WeightSource, version: str, pause: PauseMode = "keep") -> None:
        """See :meth:`RolloutEngine.update_weights`."""
        self._require_open()
        self._portal.call(self._engine.update_weights, source, version, pause)

    def weight_takers(self) -> list[str]:
        """See :meth:`RolloutEngine.weight_takers`."""
        self._require_open()
        return self._portal.call(self._engine.weight_takers)

    def health_check(self) -> None:
        """See :meth:`RolloutEngine.health_check`."""
        self._require_open()
        self._portal.call(self._engine.health_check)

    def _require_open(self) -> None:
        refuse_running_loop("RolloutEngine with `async with`")
        if self._stack is None:
            raise RuntimeError("the engine is not open: use it inside `with`")


async def _close(stream: RolloutStream) -> None:
    # After a second Ctrl-C the call that was interrupted may still be on its way out, closing it.
    if not stream.is_being_read:
        await stream.aclose()


async def _next_of(stream: RolloutStream, scope: anyio.CancelScope) -> RolloutGroup | None:
    with scope:
        return await anext(stream, None)
    return None
