"""Another node's workers, as the driver uses them: as if they were here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gymrl.actors import Actor, ActorHandle, ActorStream
from gymrl.actors.actor import contract_of
from gymrl.concurrency import OwnedTasks
from gymrl.errors import ActorClosedError, ActorDiedError, GymrlError
from gymrl.generation.service import GenerationEndpoint, GenerationService
from gymrl.gym.service import GymService

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.config import GenerationConfig, GymConfig

logger = logging.getLogger(__name__)


class RemoteNode:
    """Another node's workers, through the link to its :class:`NodeHost`.

    Args:
        host: The link, open.
        where: How errors name the node.
    """

    def __init__(self, host: ActorHandle, where: str) -> None:
        self._host = host
        self._where = where
        self._workers: dict[str, RemoteWorker] = {}
        self._tasks = OwnedTasks(where)
        host.when_dead(self._link_lost)
        self._watching = self._tasks.start(self._watch(), "deaths")

    async def open_gym(self, label: str, config: GymConfig) -> ActorHandle:
        """Start a Gym worker there."""
        await self._host.call("open_gym", label, config)
        return self._opened(label, GymService)

    async def open_generator(self, label: str, config: GenerationConfig) -> ActorHandle:
        """Start a generator there."""
        await self._host.call("open_generator", label, config)
        return self._opened(label, GenerationService)

    async def start_generator(self, label: str) -> GenerationEndpoint:
        """Make it serve the weights of now."""
        endpoint: GenerationEndpoint = await self._host.call("start_generator", label)
        return endpoint

    def _opened(self, label: str, cls: type[Actor]) -> ActorHandle:
        worker = RemoteWorker(self._host, label, cls, self._where)
        self._workers[label] = worker
        return worker

    async def _watch(self) -> None:
        try:
            async for death in self._host.stream("deaths"):
                worker = self._workers.get(death.label)
                if worker is not None:
                    worker.died(
                        ActorDiedError(
                            f"{self._where}: {death.message}",
                            actor=death.label,
                            exit_code=death.exit_code,
                            signal=death.signal,
                            stderr=death.stderr,
                        )
                    )
        except GymrlError as error:
            logger.debug("%s tells of no more deaths: %s", self._where, error)

    def _link_lost(self) -> None:
        for worker in self._workers.values():
            worker.died(
                ActorDiedError(
                    f"{self._where}: the link to it is lost; its node is down, its local rank 0 "
                    "has ended, or the network is cut",
                    actor=worker.name,
                )
            )

    async def close(self) -> None:
        """Stop listening; the workers are closed one by one, or by their node."""
        await self._tasks.close()


class RemoteWorker(ActorHandle):
    """A worker on another node, used as if it were here."""

    def __init__(self, host: ActorHandle, label: str, cls: type[Actor], where: str) -> None:
        self.name = label
        self.contract = contract_of(cls)
        self._host = host
        self._where = where
        self._death: ActorDiedError | None = None
        self._closed = False
        self._on_death: list[Callable[[], None]] = []

    @property
    def pid(self) -> int:
        """0: the process is not on this node."""
        return 0

    @property
    def closed(self) -> bool:
        """Whether it was closed or died, or the link to its node is lost."""
        return self._closed or self._death is not None or self._host.closed

    @property
    def in_flight(self) -> int:
        """Calls and streams to the whole node that have not ended."""
        return self._host.in_flight

    async def ping(self, seconds: float) -> bool:
        """Whether the node's event loop answers in time."""
        return not self.closed and await self._host.ping(seconds)

    def when_dead(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the loop when it dies without having been closed."""
        self._on_death.append(callback)

    def died(self, error: ActorDiedError) -> None:
        """It ended; what is asked of it from now on fails with `error`."""
        if self._death is not None or self._closed:
            return
        self._death = error
        for callback in self._on_death:
            callback()

    def ended(self, error: ActorDiedError) -> ActorDiedError:
        """Something asked of it found it dead: the same, with where it was."""
        located = ActorDiedError(f"{self._where}: {error.message}", **error.fields)
        self.died(located)
        return located

    def check(self) -> None:
        """Raise how it ended, if it did."""
        if self._death is not None:
            raise ActorDiedError(self._death.message, **self._death.fields)
        if self._closed:
            raise ActorClosedError(f"{self.name} is closed", actor=self.name)

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method there; see :meth:`ActorHandle.call`."""
        self.check()
        try:
            return await self._host.call(method, self.name, *args, **kwargs)
        except ActorDiedError as error:
            raise self.ended(error) from error

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> ActorStream:
        """Stream from there; see :meth:`ActorHandle.stream`."""
        self.check()
        return _RemoteStream(self, self._host.stream(method, self.name, *args, **kwargs))

    def kill(self) -> None:
        """Give it up: what is asked of it fails from now on; its node ends it."""
        self.died(ActorDiedError(f"{self._where}: {self.name} was given up", actor=self.name))

    async def close(self) -> None:
        """End it. Safe to call twice, and where the link is lost."""
        self._closed = True
        if not self._host.closed:
            try:
                await self._host.call("close_worker", self.name)
            except (ActorDiedError, ActorClosedError) as error:
                logger.debug("%s is gone with its node: %s", self.name, error)


class _RemoteStream(ActorStream):
    """A stream whose worker's death is the worker's before it is the reader's."""

    def __init__(self, worker: RemoteWorker, inner: ActorStream) -> None:
        self._worker = worker
        self._inner = inner

    async def __anext__(self) -> Any:
        try:
            return await self._inner.__anext__()
        except ActorDiedError as error:
            raise self._worker.ended(error) from error

    async def aclose(self) -> None:
        """Cancel the producer and wait until it has ended."""
        await self._inner.aclose()

    def __del__(self) -> None:
        pass
