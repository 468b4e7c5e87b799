"""One worker's place in a fleet, whoever fills it at the moment.

An instance is used like the handle of its worker. When the worker dies, what was under way fails
with :class:`~gymrl.errors.ActorDiedError`, a new one is started and prepared the same way, and what
is asked meanwhile waits for it. Past the budget of restarts the instance is *lost*: everything asked
of it fails, with how it died.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio

from gymrl.actors import ActorHandle, ActorStream
from gymrl.concurrency import OwnedTasks, close_within, deadline
from gymrl.errors import (
    ActorClosedError,
    ActorDiedError,
    GymrlError,
    RolloutStreamError,
    WeightsLostError,
)

if TYPE_CHECKING:
    from gymrl.rollout.restarts import Restarts

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
# A handle may know of its worker's end a moment before its instance is told.
_LOOK_AGAIN_S = 0.5

Open = Callable[[], Awaitable[ActorHandle]]
Prepare = Callable[[ActorHandle], Awaitable[Any]]


class Instance(ActorHandle):
    """A worker that is started again when it dies.

    Args:
        label: How rows' results, logs and errors name it.
        open_worker: Starts a worker; its set-up is done when it returns.
        prepare: Does what a fresh worker needs before it can serve; the result is its endpoint.
        restarts: The budget it shares with the fleet's others.
        start_timeout_s: Deadline of one restart.
        needs: An instance without which this one cannot serve; it is waited for, and its loss is
            this one's.

    Attributes:
        name: The label.
        endpoint: What `prepare` returned last.
        deaths: How often its worker died.
    """

    def __init__(
        self,
        label: str,
        open_worker: Open,
        prepare: Prepare,
        restarts: Restarts,
        *,
        start_timeout_s: float,
        needs: Instance | None = None,
    ) -> None:
        self.name = label
        self.endpoint: Any = None
        self.deaths = 0
        self._open = open_worker
        self._prepare = prepare
        self._restarts = restarts
        self._start_timeout_s = start_timeout_s
        self._needs = needs
        self._worker: ActorHandle | None = None
        self._is_ready = False
        self._is_lost = False
        self._loss: RolloutStreamError | None = None
        self._last_death: Exception | None = None
        self._restarts_in_a_row = 0
        self._closed = False
        self._company = 0
        self._tests = 0
        self._one_test = anyio.Lock()
        self._changed = anyio.Event()
        self._tasks = OwnedTasks(label)
        self._on_death: list[Callable[[], None]] = []
        self._on_loss: list[Callable[[RolloutStreamError], None]] = []

    # --- starting --------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the worker; call :meth:`prepare` next. Raises what starting it raises."""
        self._worker = await self._open()
        self.contract = self._worker.contract

    async def prepare(self) -> None:
        """Make the opened worker serve, and watch it from then on. Raises what preparing raises."""
        worker = self._worker
        if worker is None:
            raise ActorClosedError(f"{self.name} is not open", actor=self.name)
        self.endpoint = await self._prepare(worker)
        self._watch(worker)

    def _watch(self, worker: ActorHandle) -> None:
        if self._closed:
            return
        self._is_ready = True
        worker.when_dead(functools.partial(self._worker_died, worker))
        self._notify()
        if worker.closed:
            self._worker_died(worker)

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    # --- deaths ----------------------------------------------------------------------------------

    def _worker_died(self, worker: ActorHandle) -> None:
        if self._closed or not self._is_ready or worker is not self._worker:
            return
        self._is_ready = False
        self.deaths += 1
        self._restarts.charge(self.name)
        self._is_lost = self._restarts.is_spent
        self._notify()
        _ = self._tasks.start(self._replace(worker), f"restart {self.deaths}")
        for callback in self._on_death:
            callback()

    async def _replace(self, dead: ActorHandle) -> None:
        """Start another worker in the place of a dead one, or give the place up."""
        self._last_death = await _death_of(dead)
        logger.warning("instance %r died: %s", self.name, self._last_death)
        await close_within(dead.close(), CLOSE_TIMEOUT_S, self.name)
        while not self._restarts.is_spent:
            await anyio.sleep(self._restarts.pause_s(self._restarts_in_a_row))
            self._restarts_in_a_row += 1
            try:
                with deadline(
                    self._start_timeout_s, f"the restart of {self.name!r}", "start_timeout_s"
                ):
                    await self._start_again()
            except WeightsLostError as error:
                self._give_up(f"{error}; how it died: {_said(self._last_death)}")
                return
            except Exception as error:  # noqa: BLE001  # whoever waits must not wait for ever
                self._last_death = error
                if self._needs is not None and self._needs.is_lost:
                    break
                self._restarts.charge(self.name)
                logger.warning("instance %r did not start again: %s", self.name, error)
            else:
                logger.warning(
                    "instance %r runs again; %d more deaths can be answered so (worker_restarts)",
                    self.name,
                    self._restarts.left,
                )
                return
        self._give_up(
            f"{_said(self._last_death)} (no restart is left: worker_restarts="
            f"{self._restarts.policy.restarts})"
        )

    async def _start_again(self) -> None:
        if self._needs is not None:
            await self._needs.current()
        worker = self._worker = await self._open()
        try:
            self.endpoint = await self._prepare(worker)
        except BaseException:
            await close_within(worker.close(), CLOSE_TIMEOUT_S, self.name)
            raise
        self._watch(worker)

    def _give_up(self, because: str) -> None:
        self._is_lost = True
        self._loss = RolloutStreamError(
            f"instance {self.name!r} failed: {because}", instance=self.name
        )
        self._loss.__cause__ = self._last_death
        logger.error("%s", self._loss)
        self._notify()
        for callback in list(self._on_loss):
            callback(self._loss)

    @property
    def is_ready(self) -> bool:
        """Whether its worker serves now."""
        return self._is_ready and self._worker is not None and not self._worker.closed

    @property
    def is_lost(self) -> bool:
        """Whether it, or what it needs, died for good."""
        return self._is_lost or (self._needs is not None and self._needs.is_lost)

    def when_lost(self, callback: Callable[[RolloutStreamError], None]) -> None:
        """Have `callback` called in the loop when what this instance needs is lost.

        Its own loss is seen by whoever uses it; of the other's, a row under way may never hear.
        """
        if self._needs is not None:
            self._needs._on_loss.append(callback)

    def forget(self, callback: Callable[[RolloutStreamError], None]) -> None:
        """Undo :meth:`when_lost`; safe where it was not called."""
        if self._needs is not None and callback in self._needs._on_loss:
            self._needs._on_loss.remove(callback)

    def succeeded(self) -> None:
        """It has finished a row: its deaths, and those of what it needs, are forgiven."""
        self._restarts_in_a_row = 0
        self._restarts.refund(self.name)
        if self._needs is not None:
            self._needs.succeeded()

    # --- suspects --------------------------------------------------------------------------------

    @property
    def is_testing(self) -> bool:
        """Whether suspected rows run here, or wait to."""
        return self._tests > 0

    @contextlib.asynccontextmanager
    async def company(self) -> AsyncIterator[None]:
        """Inside it rows run that nobody suspects; waits while there are suspects."""
        await self.current()
        while self._tests:
            await self._wait_for_change()
            await self.current()
        self._company += 1
        try:
            yield
        finally:
            self._company -= 1

    @contextlib.asynccontextmanager
    async def testing(self) -> AsyncIterator[bool]:
        """Inside it the only suspected rows of this instance run.

        Yields:
            Whether they are its only rows. Others that ran before are not waited for.
        """
        self._tests += 1
        try:
            async with self._one_test:
                await self.current()
                with self._restarts.testing(self.name):
                    yield not self._company
        finally:
            self._tests -= 1
            self._notify()

    # --- as a handle -----------------------------------------------------------------------------

    async def current(self) -> ActorHandle:
        """The worker's handle, when it serves; waits for a restart that is under way.

        Raises:
            RolloutStreamError: It, or what it needs, is lost; says how it died.
            ActorClosedError: It is closed.
        """
        while True:
            if self._closed:
                raise ActorClosedError(f"{self.name} is closed", actor=self.name)
            if self._loss is not None:
                raise RolloutStreamError(str(self._loss), instance=self.name) from self._last_death
            if self._needs is not None:
                await self._needs.current()
            if self._worker is not None and self.is_ready:
                return self._worker
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        with anyio.move_on_after(_LOOK_AGAIN_S):
            await self._changed.wait()

    def check_running(self) -> None:
        """Raise unless its worker serves now.

        Raises:
            ActorDiedError: It died and is being replaced; says how.
            RolloutStreamError: It is lost.
        """
        if self._loss is not None:
            raise RolloutStreamError(str(self._loss), instance=self.name) from self._last_death
        if not self.is_ready:
            how = "" if self._last_death is None else f": {self._last_death}"
            raise ActorDiedError(
                f"{self.name} is down and being started again{how}", actor=self.name
            )

    @property
    def pid(self) -> int:
        """The process of its worker now; 0 while there is none."""
        return self._worker.pid if self._worker is not None else 0

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked of it any more."""
        return self._closed or self.is_lost

    @property
    def in_flight(self) -> int:
        """Calls and streams that have not ended."""
        return self._worker.in_flight if self._worker is not None else 0

    async def ping(self, seconds: float) -> bool:
        """Whether its worker is there and its event loop answers in time."""
        return self.is_ready and self._worker is not None and await self._worker.ping(seconds)

    def when_dead(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the loop at each death of its worker."""
        self._on_death.append(callback)

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method on the worker; see :meth:`ActorHandle.call` and :meth:`current`."""
        worker = await self.current()
        return await worker.call(method, *args, **kwargs)

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> ActorStream:
        """Stream from the worker; see :meth:`ActorHandle.stream` and :meth:`current`.

        The worker is the one that serves when the first item is asked for. A stream whose worker
        dies fails: what it gave cannot be taken back.
        """
        return _InstanceStream(self, method, args, kwargs)

    def kill(self) -> None:
        """End its worker at once; unless the instance is closed, another one is started."""
        if self._worker is not None:
            self._worker.kill()

    async def close(self) -> None:
        """End its worker, bounded, and any restart. Safe to call twice."""
        self._closed = True
        self._is_ready = False
        self._notify()
        try:
            await self._tasks.close()
        finally:
            if self._worker is not None:
                await close_within(self._worker.close(), CLOSE_TIMEOUT_S, self.name)


def _said(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"


async def _death_of(worker: ActorHandle) -> Exception:
    """How a dead worker ended, in its handle's own words."""
    try:
        with deadline(1.0, f"word of how {worker.name} ended"):
            await worker.call("health_check")
    except GymrlError as error:
        return error
    return ActorDiedError(f"{worker.name} ended", actor=worker.name)


class _InstanceStream(ActorStream):
    """A stream from the worker that serves when it begins."""

    def __init__(
        self, instance: Instance, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._instance = instance
        self._request = (method, args, kwargs)
        self._inner: ActorStream | None = None
        self._left = False

    async def __anext__(self) -> Any:
        if self._left:
            raise StopAsyncIteration
        if self._inner is None:
            method, args, kwargs = self._request
            worker = await self._instance.current()
            self._inner = worker.stream(method, *args, **kwargs)
        return await self._inner.__anext__()

    async def aclose(self) -> None:
        """Cancel the producer and wait until it has ended."""
        self._left = True
        if self._inner is not None:
            await self._inner.aclose()

    def __del__(self) -> None:
        self._inner = None
