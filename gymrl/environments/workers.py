"""An environment in worker processes.

For environments that hold the interpreter lock, leak, crash, or must be stopped in the middle of a
step.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio

from gymrl.actors import Actor, ActorHandle, SpawnOptions, spawn
from gymrl.concurrency import gather_bounded
from gymrl.environments.base import EnvironmentReturn, MessageLog
from gymrl.environments.local import OpenEnvironment
from gymrl.errors import ActorClosedError, ActorDiedError, ConfigError

logger = logging.getLogger(__name__)


class EnvironmentActor(Actor):
    """An environment in a process of its own."""

    async def setup(
        self, factory: str, arguments: dict[str, Any], name: str, max_threads: int
    ) -> None:
        """Make the environment.

        Args:
            factory: ``package.module:Class``, called with `arguments`.
            arguments: Its keyword arguments.
            name: The task name.
            max_threads: Steps of a blocking environment at a time.

        Raises:
            ConfigError: The factory does not import, or is no environment's.
        """
        self._stack = contextlib.AsyncExitStack()
        environment = load_factory(factory)(**arguments)
        self._open = OpenEnvironment(environment, name=name, max_threads=max_threads)
        if hasattr(environment, "__aenter__"):
            await self._stack.enter_async_context(environment)

    async def step(
        self, message_logs: list[list[dict[str, Any]]], metadata: list[Any]
    ) -> EnvironmentReturn:
        """One step; see :class:`gymrl.environments.base.Environment`."""
        return await self._open.step(message_logs, metadata)

    async def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """See :class:`gymrl.environments.base.BaseEnvironment`."""
        return await self._open.global_post_process_and_metrics(batch)

    async def close(self) -> None:
        """Close the environment, if it can be."""
        await self._stack.aclose()


def load_factory(factory: str) -> Callable[..., Any]:
    """The class or function that ``package.module:Name`` names.

    Raises:
        ConfigError: It has another form, or does not import.
    """
    module_name, _, name = factory.partition(":")
    if not module_name or not name:
        raise ConfigError(
            f"environment {factory!r}: write it as package.module:Class", setting="factory"
        )
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment {factory!r}: {error}", setting="factory") from error
    if not callable(found):
        raise ConfigError(f"environment {factory!r} can't be called", setting="factory")
    made: Callable[..., Any] = found
    return made


class WorkerEnvironment:
    """One environment in several worker processes.

    A step of many conversations is split over all workers, a step of one goes to the worker with
    the least to do. A worker that died is started anew for the next step; what it was doing fails
    with :class:`~gymrl.errors.ActorDiedError`, which is the fleet's fault and not the sample's.

    Args:
        open_worker: Starts the worker of a number.
        num_workers: How many.
        max_restarts: Deaths in a row, without a step that worked between them, before it gives up.
    """

    def __init__(
        self, open_worker: Callable[[int], Any], num_workers: int, max_restarts: int
    ) -> None:
        self._open_worker = open_worker
        self._workers: list[ActorHandle] = []
        self._num_workers = num_workers
        self._busy = [0] * num_workers
        self._locks = [anyio.Lock() for _ in range(num_workers)]
        self._max_restarts = max_restarts
        self._deaths = 0
        self._lost: set[ActorHandle] = set()

    async def start(self) -> None:
        """Start every worker; when one does not come up, those that did are closed."""
        try:
            for number in range(self._num_workers):
                self._workers.append(await self._open_worker(number))
        except BaseException:
            await self.close()
            raise

    async def step(self, message_logs: list[MessageLog], metadata: list[Any]) -> EnvironmentReturn:
        """See :class:`gymrl.environments.base.Environment`."""
        count = len(message_logs)
        parts = min(count, self._num_workers)
        if parts <= 1:
            least = min(range(self._num_workers), key=self._busy.__getitem__)
            return await self._step_on(least, message_logs, metadata)
        bounds = [count * part // parts for part in range(parts + 1)]

        async def one(part: int) -> EnvironmentReturn:
            chosen = slice(bounds[part], bounds[part + 1])
            return await self._step_on(part, message_logs[chosen], metadata[chosen])

        return _joined(await gather_bounded(one, range(parts)))

    async def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """On the first worker; see :class:`gymrl.environments.base.BaseEnvironment`."""
        worker = await self._living(0)
        columns, metrics = await worker.call("global_post_process_and_metrics", batch)
        return columns, metrics

    async def _step_on(
        self, number: int, message_logs: list[MessageLog], metadata: list[Any]
    ) -> EnvironmentReturn:
        self._busy[number] += len(message_logs)
        try:
            worker = await self._living(number)
            try:
                answer: EnvironmentReturn = await worker.call("step", message_logs, metadata)
            except (ActorDiedError, ActorClosedError) as error:
                self._deaths += worker not in self._lost
                self._lost.add(worker)
                if isinstance(error, ActorDiedError):
                    raise
                # It died while the call was on its way.
                raise ActorDiedError(f"worker {worker.name} is gone: {error}") from error
        finally:
            self._busy[number] -= len(message_logs)
        self._deaths = 0
        return answer

    async def _living(self, number: int) -> ActorHandle:
        async with self._locks[number]:
            worker = self._workers[number]
            if not worker.closed and worker not in self._lost:
                return worker
            if self._deaths > self._max_restarts:
                raise ActorDiedError(
                    f"worker {worker.name} died {self._deaths} times in a row; it is not "
                    "started again",
                    actor=worker.name,
                )
            logger.warning("worker %s is gone; starting it anew", worker.name)
            await worker.close()
            self._workers[number] = await self._open_worker(number)
            self._lost.discard(worker)
            return self._workers[number]

    async def close(self) -> None:
        """Close every worker. Safe to call twice."""
        workers, self._workers = self._workers, []
        with anyio.CancelScope(shield=True):
            await gather_bounded(lambda worker: worker.close(), workers)


def _joined(parts: list[EnvironmentReturn]) -> EnvironmentReturn:
    answers: list[str | None] | None = None
    if any(part.answers is not None for part in parts):
        answers = [
            answer for part in parts for answer in part.answers or [None] * len(part.observations)
        ]
    return EnvironmentReturn(
        observations=[value for part in parts for value in part.observations],
        metadata=[value for part in parts for value in part.metadata],
        next_stop_strings=[value for part in parts for value in part.next_stop_strings],
        rewards=[value for part in parts for value in part.rewards],
        terminateds=[value for part in parts for value in part.terminateds],
        answers=answers,
    )


@contextlib.asynccontextmanager
async def spawn_environment(
    factory: str,
    arguments: dict[str, Any] | None = None,
    *,
    num_workers: int = 1,
    max_threads: int = 1,
    in_process: bool = False,
    options: SpawnOptions | None = None,
) -> AsyncIterator[WorkerEnvironment]:
    """Run an environment in worker processes.

    Example::

        async with spawn_environment("my_project.env:Chess", {"size": 8}, num_workers=4) as chess:
            await run_native_rollout(prompts, generator, {"chess": chess}, ...)

    Args:
        factory: ``package.module:Class``, as the workers import it.
        arguments: Its keyword arguments; plain data.
        num_workers: Processes.
        max_threads: Steps of a blocking environment at a time, in each of them.
        in_process: No processes: the same in this one, so that breakpoints stop.
        options: Of every worker; `name` gets the worker's number behind it.

    Raises:
        ConfigError: The factory does not import, or a count is not positive.
        ActorStartError: A worker did not come up.
    """
    if num_workers <= 0:
        raise ConfigError(f"num_workers={num_workers}: must be positive", setting="num_workers")
    name = options.name if options is not None and options.name else factory.rpartition(":")[2]
    base = (options or SpawnOptions()).to_dict()

    async def open_worker(number: int) -> ActorHandle:
        return await spawn(
            EnvironmentActor,
            in_process=in_process,
            options=SpawnOptions.from_dict({**base, "name": f"{name}-{number}"}),
            factory=factory,
            arguments=arguments or {},
            name=name,
            max_threads=max_threads,
        )

    environment = WorkerEnvironment(open_worker, num_workers, max_restarts=3)
    await environment.start()
    try:
        yield environment
    finally:
        await environment.close()
