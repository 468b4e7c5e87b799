"""The workers of one node, and the host that lets the driver on another node use them.

Each node's local rank 0 starts and ends the processes of its node. The driver uses its own node's
directly, and the others' through one authenticated link a node (:mod:`gymrl.torchrun.remote`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from gymrl.actors import Actor, ActorHandle, SpawnOptions, spawn
from gymrl.concurrency import OwnedTasks, close_within, deadline, gather_bounded
from gymrl.config import (  # noqa: TC001 - actors read annotations at run time
    GenerationConfig,
    GymConfig,
)
from gymrl.errors import (
    ActorClosedError,
    ActorDiedError,
    GymrlError,
    WeightsLostError,
    WeightUpdateError,
)
from gymrl.generation.service import GenerationEndpoint, GenerationService
from gymrl.generation.weights import TransferWeights
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
        self._sent_to: set[ActorHandle] = set()
        self._updating = anyio.Lock()

    async def open_gym(self, label: str, config: GymConfig) -> ActorHandle:
        """Start a Gym worker. Raises what :func:`gymrl.actors.spawn` raises."""
        return await self._open(label, GymService, config)

    async def open_generator(self, label: str, config: GenerationConfig) -> ActorHandle:
        """Start a generator. Raises what :func:`gymrl.actors.spawn` raises.

        Raises:
            WeightsLostError: It could not be given the weights of now, which came by transfer.
        """
        if self._weights is not None and isinstance(self._weights[0], TransferWeights):
            raise _lost(label, self._weights[1])
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
                if not isinstance(source, TransferWeights):
                    await handle.call("update_weights", source, version)
                elif handle not in self._sent_to:
                    raise _lost(label, version)
            endpoint: GenerationEndpoint = await handle.call("start")
            return endpoint

    async def update_weights(self, source: WeightSource, version: str) -> None:
        """Hand weights to every generator of this node.

        Copies go to one after the other, and a generator that is dead gets them when it is started
        again. What a trainer sends by transfer they take together, all or none can go on.

        Raises:
            WeightUpdateError: One did not take them.
            ActorDiedError: One is dead, and they came by transfer.
        """
        async with self._updating:
            self._weights = (source, version)
            if isinstance(source, TransferWeights):
                await self._take_together(source, version)
                return
            for label in sorted(self._generators):
                try:
                    await self.worker(label).call("update_weights", source, version)
                except (ActorDiedError, ActorClosedError) as error:
                    logger.warning(
                        "%s gets weights %s when it runs again: %s", label, version, error
                    )

    async def _take_together(self, source: TransferWeights, version: str) -> None:
        labels = sorted(self._generators)
        workers = [self.worker(label) for label in labels]

        async def take(index: int) -> None:
            part = source.for_engine(index, len(workers))
            try:
                await workers[index].call("update_weights", part, version)
            except Exception as error:
                # The others may wait for tensors that come no more, deaf to everything else.
                for worker in workers:
                    if worker is not workers[index]:
                        worker.kill()
                if isinstance(error, WeightUpdateError):
                    text = f"{labels[index]}: {error}"
                    raise type(error)(text, **error.fields) from error
                raise

        self._sent_to.clear()
        await gather_bounded(take, range(len(workers)))
        self._sent_to.update(workers)

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


def _lost(label: str, version: str) -> WeightsLostError:
    return WeightsLostError(
        f"{label} can't be started again with weights {version!r}: they came by transfer "
        "(weight_transfer), and nothing holds them now; the job ends, to be started again from its "
        "checkpoint (torchrun's --max-restarts does so)",
        version=version,
    )


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
