"""An environment in this process, in the event loop or in threads.

An async environment runs in the event loop it is stepped from. A plain one runs in a thread, one
step at a time unless told otherwise, so that it blocks no loop and need not be thread-safe. Either
may live in worker processes instead: :mod:`gymrl.environments.workers`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import anyio

from gymrl.actors import ActorHandle
from gymrl.environments.base import Environment, EnvironmentReturn, MessageLog, settled
from gymrl.errors import ConfigError, EnvironmentContractError, RolloutDataFailure

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
            RolloutDataFailure: The environment asked for the end of the process (``sys.exit``).
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
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            answer = await self._in_thread(self._run, function, *args)
            return await answer if inspect.isawaitable(answer) else answer
        except SystemExit as error:
            raise self._left(error) from error

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """A call in a thread, out of which come errors alone, nothing that ends a process."""
        try:
            return function(*args)
        except Exception:
            raise
        except BaseException as error:
            raise self._left(error) from error

    def _left(self, error: BaseException) -> RolloutDataFailure:
        return RolloutDataFailure(
            f"environment {self.name!r} raised {error!r}, which would end this process; it ends the "
            "step alone"
        )

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
