"""The caller's end of an actor: calls, streams, close and kill."""

from __future__ import annotations

import abc
import logging
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gymrl.actors.contract import ActorContract
    from gymrl.actors.streams import ActorStream

logger = logging.getLogger(__name__)


class ActorHandle(abc.ABC):
    """An actor that runs somewhere: in a child process, on another node, or in this loop.

    Any number of tasks of the event loop it was opened in may use a handle at once. Leaving its
    ``async with`` closes it.

    Attributes:
        name: What logs and errors call the actor.
        contract: Its methods.
    """

    name: str
    contract: ActorContract

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """The process that the actor runs in."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """True once it was closed or killed, or died, and no more calls can be made."""

    @property
    @abc.abstractmethod
    def in_flight(self) -> int:
        """Calls and streams that have not ended."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages sent to the actor so far, arrays included; 0 in process."""
        return 0

    @abc.abstractmethod
    async def ping(self, seconds: float) -> bool:
        """Whether the actor's event loop answers within so many seconds."""

    @abc.abstractmethod
    def when_dead(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the loop when the actor dies without having been closed.

        At once, when it is dead already.
        """

    @abc.abstractmethod
    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method and wait for its result.

        Cancelling the caller cancels the callee, and waits for it to end, at most
        `SpawnOptions.cancel_timeout_s`.

        Args:
            method: Name of a public ``async def`` method.
            *args: Its arguments, checked against the annotations before anything is sent.
            **kwargs: The same, by name.

        Raises:
            AttributeError: There is no such method.
            TypeError: Arguments are missing, unknown or too many.
            EncodeError: An argument is not of its type or cannot travel; or the result cannot.
            ActorClosedError: The handle is closed.
            ActorDiedError: The process ended before the result came.
            RemoteError: The callee raised an error of a type unknown here. Errors of
                :mod:`gymrl.errors` and plain builtins are raised as themselves.
        """

    @abc.abstractmethod
    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> ActorStream:
        """The items of an async generator method, as an async iterator.

        Arguments are checked here and now; the producer starts with the first item asked for. The
        iterator raises what :meth:`call` raises, and
        :class:`~gymrl.errors.ActorStreamError` when the link ends without an end marker.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Run the actor's ``close``, end its process and wait for that.

        Takes at most `SpawnOptions.close_timeout_s` and a little, then kills. Safe to call twice
        and while being cancelled. Calls still in flight fail with
        :class:`~gymrl.errors.ActorClosedError`.

        Raises:
            Exception: What the actor's ``close`` raised, after everything has ended.
        """

    @abc.abstractmethod
    def kill(self) -> None:
        """End the actor at once, without its ``close``; what is in flight fails."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close()
        except Exception:
            # The error that led here is the one to be raised.
            logger.exception("closing %s failed", self.name)
