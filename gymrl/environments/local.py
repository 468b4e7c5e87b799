"""Where an environment runs: in this process, in threads of it, or in worker processes.

An async environment runs in the event loop it is stepped from. A plain one runs in a thread, one
step at a time unless told otherwise, so that it blocks no loop and need not be thread-safe. Either
may live in worker processes instead (:func:`spawn_environment`): for environments that hold the
interpreter lock, leak, crash, or must be stopped in the middle of a step.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio

from gymrl.actors import Actor, ActorHandle, SpawnOptions, spawn
from gymrl.concurrency import gather_bounded
from gymrl.environments.base import Environment, EnvironmentReturn, MessageLog, settled
from gymrl.errors import ActorClosedError, ActorDiedError, ConfigError, EnvironmentContractError

logger = logging.getLogger(__name__)

STUCK_AFTER_S = 10.0


class OpenEnvironment:
    """An environment behind one async face, its answers checked.

    Args:
        environment: Anything with a ``step``, async or not.
        name: The task name, for errors and logs.
        max_threads: Steps of a blocking environment at a time.
        stuck_after_s: A cancelled step whose thread goes on for longer is logged, and again each
            time it passes.

    Raises:
        ConfigError: There is no ``step``, or `max_threads` is not positive.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        name: str,
        max_threads: int = 1,
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        if not callable(getattr(environment, "step", None)):
            raise ConfigError(
                f"environment {name!r} ({type(environment).__name__}) has no step method",
                setting="environments",
            )
        if max_threads <= 0:
            raise ConfigError(f"max_threads={max_threads}: must be positive", setting="max_threads")
        self.name = name
        self._environment = environment
        self._limiter = anyio.CapacityLimiter(max_threads)
        self._stuck_after_s = stuck_after_s

    async def step(self, message_logs: list[MessageLog], metadata: list[Any]) -> EnvironmentReturn:
        """One step over B conversations.

        Cancelling it cancels an async step. A thread can't be stopped: the call returns when the
        step has ended, and says so in the log while it waits.

        Raises:
            EnvironmentContractError: The answer is not what the protocol says.
            Exception: What the environment raised.
        """
        answer = await self._call(self._environment.step, message_logs, metadata)
        return settled(answer, len(message_logs), self.name)

    async def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """See :meth:`gymrl.environments.base.BaseEnvironment.global_post_process_and_metrics`.

        An environment without it leaves the columns as they are and has no numbers to add.

        Raises:
            EnvironmentContractError: It did not return columns and numbers.
        """
        function = getattr(self._environment, "global_post_process_and_metrics", None)
        if function is None:
            return batch, {}
        answer = await self._call(function, batch)
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise EnvironmentContractError(
                f"environment {self.name!r}: global_post_process_and_metrics must return the "
                f"batch and a mapping of metrics, not {answer!r:.200}",
                task_name=self.name,
            )
        columns, metrics = answer
        return dict(columns), {str(name): float(value) for name, value in metrics.items()}

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        answer = await self._in_thread(function, *args)
        return await answer if inspect.isawaitable(answer) else answer

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` in a thread, in a task of its own so that every kind of cancel waits."""
        results: list[Any] = []
        errors: list[Exception] = []
        ended = anyio.Event()

        async def run() -> None:
            try:
                results.append(
                    await anyio.to_thread.run_sync(function, *args, limiter=self._limiter)
                )
            except Exception as error:  # noqa: BLE001 - raised below, outside of the task group
                errors.append(error)
            finally:
                ended.set()
                watch.cancel()

        async with anyio.create_task_group() as group:
            watch = anyio.CancelScope()
            group.start_soon(run)
            with watch:
                await self._wait(ended)
        if errors:
            raise errors[0]
        return results[0]

    async def _wait(self, ended: anyio.Event) -> None:
        try:
            await ended.wait()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                while not ended.is_set():
                    with anyio.move_on_after(self._stuck_after_s):
                        await ended.wait()
                    if not ended.is_set():
                        logger.warning(
                            "environment %r: a cancelled step still runs; a thread can't be "
                            "stopped (spawn_environment runs it in a process that can)",
                            self.name,
                        )
            raise


def open_environment(
    environment: Environment | OpenEnvironment | ActorHandle, *, name: str, max_threads: int = 1
) -> OpenEnvironment:
    """`environment` as rollouts step it; an actor's handle is called through its messages."""
    if isinstance(environment, OpenEnvironment):
        return environment
    if isinstance(environment, ActorHandle):
        environment = _Remote(environment)
    return OpenEnvironment(environment, name=name, max_threads=max_threads)


class _Remote:
    """An actor's handle in the shape of an environment."""

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    async def step(self, message_logs: list[MessageLog], metadata: list[Any]) -> Any:
        return await self._handle.call("step", message_logs, metadata)

    async def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
        if "global_post_process_and_metrics" not in self._handle.contract.methods:
            return batch, {}
        return await self._handle.call("global_post_process_and_metrics", batch)


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
