"""Many workers of one actor class: dispatch, restarts, poison, health, close."""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Self

import anyio
import msgspec

from gymrl.actors.actor import Actor, contract_of
from gymrl.actors.codec import RoundTrip
from gymrl.actors.loading import locate
from gymrl.actors.options import SpawnOptions
from gymrl.actors.restarting import RestartPolicy, WorkerHealth
from gymrl.actors.spawn import spawn
from gymrl.actors.streams import ActorStream
from gymrl.actors.suspects import Suspects
from gymrl.concurrency import OwnedTasks, close_within, gather_bounded, growing_pause, run_to_end
from gymrl.config import require
from gymrl.errors import ActorClosedError, ActorDiedError

if TYPE_CHECKING:
    from types import TracebackType

    from gymrl.actors.handle import ActorHandle

logger = logging.getLogger(__name__)


class _Worker:
    """One place for a worker, whoever fills it at the moment."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle: ActorHandle | None = None
        self.state = "starting"
        self.reserved = False
        self.deaths = 0
        self.deaths_in_a_row = 0
        self.spent = 0

    @property
    def in_flight(self) -> int:
        return self.handle.in_flight if self.handle is not None else 0


class Supervisor:
    """Several workers of one actor class, kept alive, and called as one.

    ::

        async with Supervisor(Counter, replicas=4, start=3) as counters:
            await counters.call("add", 4)

    A call goes to the worker with the least under way. Set-up runs again, with the same arguments,
    at every restart.

    Args:
        cls: The actor class.
        replicas: How many workers.
        in_process: Run them in this loop; see :func:`~gymrl.actors.spawn.spawn`.
        options: Of each worker; names get the worker's number.
        policy: What happens when workers die.
        **setup: Arguments of every worker's ``setup``.

    Raises:
        ConfigError: `replicas` is not positive.
        Exception: What :func:`~gymrl.actors.spawn.spawn` raises.
    """

    def __init__(
        self,
        cls: type[Actor],
        *,
        replicas: int = 1,
        in_process: bool = False,
        options: SpawnOptions | None = None,
        policy: RestartPolicy | None = None,
        **setup: Any,
    ) -> None:
        require(replicas > 0, "replicas", replicas, "must be positive")
        self.contract = contract_of(cls)
        options = options or SpawnOptions()
        self.name = options.name or cls.__name__
        self._codec = RoundTrip()
        self._policy = policy or RestartPolicy()
        self._options = options
        self._spawn = functools.partial(spawn, cls, in_process=in_process, **setup)
        self.contract.setup.bind((), setup, self._codec)
        if not in_process:
            locate(cls, self.name)
        self._workers = [_Worker(index) for index in range(replicas)]
        self._tasks = OwnedTasks(self.name)
        self._budget = self._policy.restarts
        self._incident: tuple[float, set[int]] = (float("-inf"), set())
        self._suspects = Suspects(self.name, self._policy.poison_after)
        self._one_suspect = anyio.Lock()
        self._changed = anyio.Event()
        self._last_death: Exception | None = None
        self._closed = False

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await gather_bounded(self._start, self._workers)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _start(self, worker: _Worker) -> None:
        options = msgspec.structs.replace(self._options, name=f"{self.name}-{worker.index}")
        handle = await self._spawn(options=options)
        worker.handle = handle
        worker.state = "ready"
        handle.when_dead(functools.partial(self._on_death, worker))
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def close(self) -> None:
        """Close all workers at once; each is bounded by its `close_timeout_s`. Safe twice.

        An error of an actor's ``close`` is logged: the other workers are closed all the same. A
        caller that is cancelled meanwhile goes on when all have ended.
        """
        self._closed = True
        self._notify()
        await run_to_end(self._close_all(), self.name)

    async def _close_all(self) -> None:
        await self._tasks.close()

        async def close(worker: _Worker) -> None:
            if worker.handle is not None:
                # Bounded by the handle itself; the limit here is for a bound that fails.
                limit = self._options.close_timeout_s + 30
                await close_within(worker.handle.close(), limit, f"{self.name}-{worker.index}")

        await gather_bounded(close, self._workers)

    @property
    def workers(self) -> list[ActorHandle]:
        """The handles of the workers that are ready, by place."""
        return [w.handle for w in self._workers if w.state == "ready" and w.handle is not None]

    async def health(self, timeout_s: float = 1.0) -> list[WorkerHealth]:
        """How each worker is; pings them all at once."""

        async def one(worker: _Worker) -> WorkerHealth:
            handle = worker.handle if worker.state == "ready" else None
            responsive = await handle.ping(timeout_s) if handle is not None else False
            return WorkerHealth(
                index=worker.index,
                pid=handle.pid if handle is not None else None,
                state=worker.state,
                in_flight=worker.in_flight,
                deaths=worker.deaths,
                responsive=responsive,
            )

        return await gather_bounded(one, self._workers)

    # --- deaths ----------------------------------------------------------------------------------

    def _on_death(self, worker: _Worker) -> None:
        if self._closed:
            return
        worker.state = "dead"
        worker.deaths += 1
        self._charge(worker)
        self._notify()
        if not self._closed:
            self._restarting = self._tasks.start(self._restart(worker), f"restart-{worker.index}")

    def _charge(self, worker: _Worker) -> None:
        """Take one death from the budget, unless it is part of an event already paid for."""
        now = time.monotonic()
        began, members = self._incident
        if now - began <= self._policy.correlation_s and worker.index not in members:
            members.add(worker.index)
            return
        self._incident = (now, {worker.index})
        self._budget -= 1
        worker.spent += 1

    async def _restart(self, worker: _Worker) -> None:
        while self._budget >= 0:
            dead, worker.handle = worker.handle, None
            if dead is not None:
                await close_within(dead.close(), self._options.close_timeout_s + 30, dead.name)
            if worker.deaths_in_a_row:
                policy = self._policy
                await anyio.sleep(
                    growing_pause(policy.backoff_s, worker.deaths_in_a_row, policy.max_backoff_s)
                )
            worker.deaths_in_a_row += 1
            worker.state = "starting"
            logger.warning(
                "%s-%d is restarted (%d more)", self.name, worker.index, max(0, self._budget)
            )
            try:
                await self._start(worker)
                return
            except Exception as error:  # noqa: BLE001  # whatever it is, calls must not wait for ever
                logger.warning("%s-%d did not start again: %s", self.name, worker.index, error)
                self._last_death = error
                worker.state = "dead"
                self._budget -= 1
                worker.spent += 1
        worker.state = "lost"
        logger.error(
            "%s-%d is given up: the budget of %d restarts is spent (RestartPolicy.restarts)",
            self.name,
            worker.index,
            self._policy.restarts,
        )
        self._notify()

    def _succeeded(self, worker: _Worker) -> None:
        if worker.spent or worker.deaths_in_a_row:
            self._budget = min(self._policy.restarts, self._budget + worker.spent)
            worker.spent = worker.deaths_in_a_row = 0

    # --- dispatch --------------------------------------------------------------------------------

    async def _acquire(self) -> _Worker:
        """The ready worker with the least under way; waits while there is none."""
        while True:
            ready = [
                w
                for w in self._workers
                if w.state == "ready"
                and not w.reserved
                and w.handle is not None
                and not w.handle.closed
            ]
            if ready:
                return min(ready, key=lambda worker: worker.in_flight)
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        if self._closed:
            raise ActorClosedError(f"{self.name} is closed", actor=self.name)
        if all(worker.state == "lost" for worker in self._workers):
            raise ActorDiedError(
                f"all {len(self._workers)} workers of {self.name} are dead and the budget of "
                f"{self._policy.restarts} restarts is spent (RestartPolicy.restarts); the last "
                f"reason: {self._last_death}",
                actor=self.name,
            ) from self._last_death
        # The pause looks after a worker that is dying: its handle knows before we are told.
        with anyio.move_on_after(0.5):
            await self._changed.wait()

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method on one of the workers; see :meth:`ActorHandle.call`.

        A call whose worker died is dispatched again, unless `RestartPolicy.redispatch` is off.

        Raises:
            PoisonError: The call was running at `RestartPolicy.poison_after` deaths.
            ActorDiedError: No worker is left, or calls are not dispatched again.
            Exception: What :meth:`ActorHandle.call` raises.
        """
        contract = self.contract.method(method, "call")
        bound = contract.bind(args, kwargs, self._codec)
        alone = bool(self._suspects) and self._suspects.check(contract.label, bound)
        while True:
            if self._closed:
                raise ActorClosedError(f"{self.name} is closed", actor=self.name)
            try:
                if alone:
                    return await self._call_alone(method, args, kwargs)
                worker = await self._acquire()
                return await self._call_on(worker, method, args, kwargs)
            except _WorkerDied as died:
                self._last_death = died.error
                self._suspects.add_death(contract.label, bound, died.error)
                if not self._policy.redispatch:
                    raise died.error from None
                alone = True

    async def _call_alone(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call on a worker that runs nothing else, one such call at a time."""
        async with self._one_suspect:
            worker = await self._acquire()
            worker.reserved = True
            try:
                while worker.in_flight and worker.state == "ready":  # noqa: ASYNC110  # rare, short
                    await anyio.sleep(0.005)
                return await self._call_on(worker, method, args, kwargs)
            finally:
                worker.reserved = False
                self._notify()

    async def _call_on(
        self, worker: _Worker, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        handle = worker.handle
        if handle is None:
            raise _WorkerDied(ActorDiedError(f"{self.name}-{worker.index} is dead"))
        try:
            result = await handle.call(method, *args, **kwargs)
        except ActorDiedError as error:
            if handle.closed and not self._closed:
                raise _WorkerDied(error) from None
            raise
        self._succeeded(worker)
        return result

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> SupervisedStream:
        """Stream from one of the workers; see :meth:`ActorHandle.stream`.

        A worker is chosen when the first item is asked for. A stream whose worker dies fails with
        :class:`~gymrl.errors.ActorDiedError`: what it had given cannot be taken back.
        """
        contract = self.contract.method(method, "stream")
        contract.bind(args, kwargs, self._codec)
        return SupervisedStream(self, method, args, kwargs)


class _WorkerDied(Exception):
    """A worker died under a call; the error is what the handle said."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class SupervisedStream(ActorStream):
    """A stream from whichever worker is chosen when it begins."""

    def __init__(
        self, supervisor: Supervisor, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._supervisor = supervisor
        self._request = (method, args, kwargs)
        self._inner: ActorStream | None = None
        self._left = False

    async def __anext__(self) -> Any:
        if self._inner is None:
            if self._left:
                raise StopAsyncIteration
            worker = await self._supervisor._acquire()
            assert worker.handle is not None
            method, args, kwargs = self._request
            self._inner = worker.handle.stream(method, *args, **kwargs)
        return await self._inner.__anext__()

    async def aclose(self) -> None:
        """Cancel the producer and wait until it has ended."""
        self._left = True
        if self._inner is not None:
            await self._inner.aclose()

    def __del__(self) -> None:
        self._inner = None
