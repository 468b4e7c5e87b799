"""The twin of a worker process for debugging: the same handle in the caller's own loop.

Arguments, results and errors take the same round trip as across processes, so that what works here
works there. Methods run where they can be stepped through: a call in the caller's own task, so that
a stack trace is whole; a stream's producer in a task beside it, as in a worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.actors.actor import Actor, contract_of
from gymrl.actors.codec import RoundTrip
from gymrl.actors.failures import MAX_ECHO, bounded, describe, rebuild, start_error
from gymrl.actors.handle import ActorHandle
from gymrl.actors.streams import ActorStream, StreamState, Window
from gymrl.concurrency import OwnedTasks
from gymrl.errors import ActorClosedError, ActorDiedError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.actors.contract import MethodContract
    from gymrl.actors.options import SpawnOptions

logger = logging.getLogger(__name__)


class InProcessHandle(ActorHandle):
    """A handle whose actor lives in this process and loop."""

    def __init__(self, cls: type[Actor], name: str, options: SpawnOptions) -> None:
        self.name = name
        self.contract = contract_of(cls)
        self._cls = cls
        self._options = options
        self._codec = RoundTrip()
        self._actor: Actor | None = None
        self._scopes: set[anyio.CancelScope] = set()
        self._producers: dict[StreamState, tuple[asyncio.Task[None], Window]] = {}
        self._tasks = OwnedTasks(name)
        self._end: Exception | None = None
        self._on_death: list[Callable[[], None]] = []

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    @property
    def closed(self) -> bool:
        """Whether it was closed or killed."""
        return self._end is not None

    @property
    def in_flight(self) -> int:
        """Calls and streams that have not ended."""
        return len(self._scopes) + len(self._producers)

    def when_dead(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the loop when the actor is killed; at once, when it is."""
        if isinstance(self._end, ActorDiedError):
            asyncio.get_running_loop().call_soon(callback)
        self._on_death.append(callback)

    async def ping(self, seconds: float) -> bool:
        """Whether the actor is there."""
        return self._end is None

    async def open(self, setup: dict[str, Any]) -> None:
        """Make the actor and run its set-up.

        Raises:
            ActorStartError: The set-up raised; its error is the cause.
        """
        contract = self.contract.setup
        arguments = self._crossing(contract, contract.bind((), setup, self._codec))
        actor = self._cls()
        try:
            await contract.invoke(actor, arguments)
        except Exception as error:
            self._end = ActorClosedError(f"{self.name} did not start", actor=self.name)
            raise start_error(self._as_seen_by_caller(error), self.name) from error
        self._actor = actor

    def _crossing(self, contract: MethodContract, arguments: msgspec.Struct) -> msgspec.Struct:
        """The arguments as the callee would decode them."""
        try:
            crossed: msgspec.Struct = self._codec.round_trip(
                arguments, contract.arguments, contract.arguments_root
            )
        except msgspec.ValidationError as error:
            raise EncodeError(f"{contract.label}(): {bounded(str(error), MAX_ECHO)}") from None
        return crossed

    def _result(self, contract: MethodContract, value: object) -> Any:
        root = contract.result_root
        try:
            return self._codec.round_trip(value, contract.result, root)
        except msgspec.ValidationError as error:
            text = bounded(str(error), MAX_ECHO)
            raise EncodeError(f"{root} is not what its annotation says: {text}") from None

    def _as_seen_by_caller(self, error: BaseException) -> Exception:
        return rebuild(describe(error), self.name)

    def _require_open(self) -> Actor:
        if self._end is not None:
            raise type(self._end)(str(self._end), **getattr(self._end, "fields", {}))
        if self._actor is None:
            raise ActorClosedError(f"{self.name} is not open", actor=self.name)
        return self._actor

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Await the method in the caller's own task; see :meth:`ActorHandle.call`."""
        contract = self.contract.method(method, "call")
        arguments = self._crossing(contract, contract.bind(args, kwargs, self._codec))
        actor = self._require_open()
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                return self._result(contract, await contract.invoke(actor, arguments))
        except KeyboardInterrupt:
            raise  # the person at this very terminal
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._as_seen_by_caller(error) from error
        except EncodeError:
            raise
        except BaseException as error:
            raise self._as_seen_by_caller(error) from error
        finally:
            self._scopes.discard(scope)
        self._require_open()  # only closing and killing cancel the scope
        raise ActorClosedError(f"{self.name} was closed during {contract.label}", actor=self.name)

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> ActorStream:
        """Run the generator in a task beside the reader; see :meth:`ActorHandle.stream`."""
        contract = self.contract.method(method, "stream")
        arguments = self._crossing(contract, contract.bind(args, kwargs, self._codec))
        options = self._options
        state = StreamState(
            self,
            f"{contract.label} of {self.name}",
            options.stream_window,
            options.stream_window_bytes,
            options.cancel_timeout_s,
        )
        state.contract, state.arguments = contract, arguments
        return ActorStream(state)

    def open_stream(self, state: StreamState) -> None:
        """Start the producer's task."""
        actor = self._require_open()
        window = Window(state.window, state.window_bytes)
        task = self._tasks.start(self._produce(actor, state, window), state.contract.name)
        self._producers[state] = (task, window)

    def grant(self, state: StreamState, items: int) -> None:
        """Let the producer run further ahead."""
        if state in self._producers:
            self._producers[state][1].credit(items)

    def cancel_stream(self, state: StreamState) -> None:
        """Cancel the producer's task, after its first step at the earliest."""
        if state in self._producers:
            task = self._producers[state][0]
            asyncio.get_running_loop().call_soon(task.cancel)

    async def _produce(self, actor: Actor, state: StreamState, window: Window) -> None:
        failure: Exception | None = None
        try:
            items = state.contract.invoke(actor, state.arguments)
            try:
                async for item in items:
                    if not window.is_open:
                        await window.wait()
                    state.push(self._result(state.contract, item), 0)
                    window.take(0)
            finally:
                await items.aclose()
        except asyncio.CancelledError as error:
            if self._end is not None:
                failure = self._end
            elif not state.cancelled:
                failure = self._as_seen_by_caller(error)
                failure.__cause__ = error
        except EncodeError as error:
            failure = error
        except BaseException as error:  # noqa: BLE001  # goes to the reader, whatever it is
            failure = self._as_seen_by_caller(error)
            failure.__cause__ = error
        finally:
            self._producers.pop(state, None)
            state.end(failure)

    async def close(self) -> None:
        """End what is in flight, then run the actor's ``close``, bounded."""
        if self._end is None:
            self._end = ActorClosedError(f"{self.name} is closed", actor=self.name)
        await self._end_work()
        actor, self._actor = self._actor, None
        if actor is None:
            return
        failure: BaseException | None = None
        with anyio.move_on_after(self._options.close_timeout_s, shield=True) as scope:
            try:
                await actor.close()
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001  # raised below, when all has ended
                failure = error
        if scope.cancelled_caught:
            logger.warning("%s.close took over %g s", self.name, self._options.close_timeout_s)
        if failure is not None:
            raise self._as_seen_by_caller(failure) from failure

    async def _end_work(self) -> None:
        for scope in list(self._scopes):
            scope.cancel()
        with anyio.move_on_after(self._options.close_timeout_s, shield=True):
            await self._tasks.close()

    def kill(self) -> None:
        """Fail what is in flight as if the process had been killed; ``close`` does not run."""
        if self._end is None:
            for callback in self._on_death:
                asyncio.get_running_loop().call_soon(callback)
            self._end = ActorDiedError(
                f"{self.name} was killed by its handle", actor=self.name, signal=9
            )
        self._actor = None
        for scope in list(self._scopes):
            scope.cancel()
        for task, _ in list(self._producers.values()):
            asyncio.get_running_loop().call_soon(task.cancel)
