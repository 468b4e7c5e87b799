"""The workers of one node, and the same seen from the driver's node.

Each node's local rank 0 starts and ends the processes of its node. The driver uses its own node's
directly, and the others' through one authenticated link a node.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from gymrl.actors import Actor, ActorHandle, ActorStream, SpawnOptions, spawn
from gymrl.actors.actor import contract_of
from gymrl.concurrency import OwnedTasks, close_within, deadline
from gymrl.config import (  # noqa: TC001 - actors read annotations at run time
    GenerationConfig,
    GymConfig,
)
from gymrl.errors import ActorClosedError, ActorDiedError, GymrlError
from gymrl.generation.service import GenerationEndpoint, GenerationService
from gymrl.gym.service import GymEndpoint, GymService
from gymrl.rollout.timing import TIMER_PREFIX
from gymrl.types import Row, RowResult  # noqa: TC001 - as above

if TYPE_CHECKING:
    from gymrl.generation.weights import WeightSource
    from gymrl.torchrun.config import TorchrunConfig

logger = logging.getLogger(__name__)


class Node(Protocol):
    """Where an instance's worker is started."""

    async def open_gym(self, label: str, config: GymConfig) -> ActorHandle:
        """Start a Gym worker."""
        ...

    async def open_generator(self, label: str, config: GenerationConfig) -> ActorHandle:
        """Start a generator."""
        ...

    async def start_generator(self, label: str) -> GenerationEndpoint:
        """Make an opened generator serve the weights of now."""
        ...


class WorkerDeath(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker of a node ended."""

    label: str
    message: str
    exit_code: int | None = None
    signal: int | None = None
    stderr: str | None = None


class NodeWorkers:
    """The processes of this node; lives in one event loop.

    Args:
        config: Of the job.
    """

    def __init__(self, config: TorchrunConfig) -> None:
        self._rollout = config.rollout
        self._close_timeout_s = config.close_timeout_s
        self._workers: dict[str, ActorHandle] = {}
        self._generators: set[str] = set()
        self._weights: tuple[WeightSource, str] | None = None
        self._updating = anyio.Lock()

    async def open_gym(self, label: str, config: GymConfig) -> ActorHandle:
        """Start a Gym worker. Raises what :func:`gymrl.actors.spawn` raises."""
        return await self._open(label, GymService, config)

    async def open_generator(self, label: str, config: GenerationConfig) -> ActorHandle:
        """Start a generator. Raises what :func:`gymrl.actors.spawn` raises."""
        handle = await self._open(label, GenerationService, config)
        self._generators.add(label)
        return handle

    async def _open(self, label: str, actor: type[Actor], config: Any) -> ActorHandle:
        options = SpawnOptions(
            name=label,
            start_timeout_s=self._rollout.start_timeout_s,
            heartbeat_timeout_s=self._rollout.heartbeat_timeout_s,
        )
        in_process = self._rollout.in_process
        handle = await spawn(actor, in_process=in_process, options=options, config=config)
        self._workers[label] = handle
        return handle

    async def start_generator(self, label: str) -> GenerationEndpoint:
        """Make an opened generator serve; one that was started again gets the weights of now."""
        async with self._updating:
            handle = self.worker(label)
            if self._weights is not None:
                source, version = self._weights
                await handle.call("update_weights", source, version)
            endpoint: GenerationEndpoint = await handle.call("start")
            return endpoint

    async def update_weights(self, source: WeightSource, version: str) -> None:
        """Hand weights to every generator of this node, one after the other.

        A generator that is dead gets them when it is started again.

        Raises:
            WeightUpdateError: One did not take them.
        """
        async with self._updating:
            self._weights = (source, version)
            for label in sorted(self._generators):
                try:
                    await self.worker(label).call("update_weights", source, version)
                except (ActorDiedError, ActorClosedError) as error:
                    logger.warning(
                        "%s gets weights %s when it runs again: %s", label, version, error
                    )

    def worker(self, label: str) -> ActorHandle:
        """The worker that was opened last under a label.

        Raises:
            ActorClosedError: There is none.
        """
        handle = self._workers.get(label)
        if handle is None:
            raise ActorClosedError(f"no worker {label!r} is open on this node", actor=label)
        return handle

    async def close_worker(self, label: str) -> None:
        """End a worker. Safe where there is none."""
        handle = self._workers.pop(label, None)
        if handle is not None:
            await close_within(handle.close(), self._close_timeout_s, label)

    async def close(self) -> None:
        """End every process: Gym workers, then the generators they call. Safe to call twice."""
        labels = sorted(self._workers, key=lambda label: label in self._generators)
        for label in labels:
            await self.close_worker(label)


_offered: dict[str, NodeWorkers] = {}
"""What a `NodeHost` of this process may serve, by key; see :func:`offer`."""


def offer(key: str, workers: NodeWorkers) -> None:
    """Let a :class:`NodeHost` whose set-up names `key` serve these workers."""
    _offered[key] = workers


def withdraw(key: str) -> None:
    """Undo :func:`offer`."""
    _offered.pop(key, None)


class NodeHost(Actor):
    """The workers of a node, for the driver on another one."""

    async def setup(self, key: str) -> None:
        """Serve what was offered under a key."""
        self._node = _offered[key]
        self._dead_in, self._dead_out = anyio.create_memory_object_stream[WorkerDeath](1000)
        self._tasks = OwnedTasks("deaths")

    async def open_gym(self, label: str, config: GymConfig) -> None:
        """See :class:`NodeWorkers`."""
        self._watch(label, await self._node.open_gym(label, config))

    async def open_generator(self, label: str, config: GenerationConfig) -> None:
        """See :class:`NodeWorkers`."""
        self._watch(label, await self._node.open_generator(label, config))

    async def start_generator(self, label: str) -> GenerationEndpoint:
        """See :class:`NodeWorkers`."""
        return await self._node.start_generator(label)

    async def spin_up(self, label: str, base_urls: list[str], model_name: str) -> GymEndpoint:
        """See :class:`~gymrl.gym.service.GymService`."""
        endpoint: GymEndpoint = await self._node.worker(label).call(
            "spin_up", base_urls, model_name
        )
        return endpoint

    async def run_rollouts(
        self, label: str, rows: list[Row], timer_prefix: str = TIMER_PREFIX
    ) -> AsyncIterator[RowResult]:
        """See :class:`~gymrl.gym.service.GymService`."""
        stream = self._node.worker(label).stream("run_rollouts", rows, timer_prefix)
        try:
            async for result in stream:
                yield result
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    async def health_check(self, label: str) -> None:
        """Ask a worker whether it is well."""
        await self._node.worker(label).call("health_check")

    async def close_worker(self, label: str) -> None:
        """End a worker."""
        await self._node.close_worker(label)

    async def deaths(self) -> AsyncIterator[WorkerDeath]:
        """Each worker that dies without having been closed, and how."""
        async for death in self._dead_out:
            yield death

    def _watch(self, label: str, worker: ActorHandle) -> None:
        def report() -> None:
            self._reporting = self._tasks.start(self._report(label, worker), label)

        worker.when_dead(report)

    async def _report(self, label: str, worker: ActorHandle) -> None:
        error = await _last_words(worker)
        await self._dead_in.send(
            WorkerDeath(
                label=label,
                message=error.message,
                exit_code=error.exit_code,
                signal=error.signal,
                stderr=error.stderr,
            )
        )

    async def close(self) -> None:
        """Stop watching; the workers are their node's to end."""
        await self._tasks.close()
        self._dead_in.close()
        self._dead_out.close()


async def _last_words(worker: ActorHandle) -> ActorDiedError:
    try:
        with deadline(1.0, f"word of how {worker.name} ended"):
            await worker.call("health_check")
    except ActorDiedError as error:
        return error
    except GymrlError as error:
        return ActorDiedError(f"{worker.name} ended: {error}", actor=worker.name)
    return ActorDiedError(f"{worker.name} ended", actor=worker.name)


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
