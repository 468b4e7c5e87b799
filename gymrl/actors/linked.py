"""What every handle answers whose actor is at the other end of a link, wherever that end is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio

from gymrl.actors import messages
from gymrl.actors.actor import Actor, contract_of
from gymrl.actors.handle import ActorHandle
from gymrl.actors.link import Caller
from gymrl.concurrency import OwnedTasks
from gymrl.errors import ActorClosedError, ProtocolVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gymrl.actors.channel import Channel
    from gymrl.actors.options import SpawnOptions
    from gymrl.actors.streams import ActorStream


class LinkedHandle(ActorHandle):
    """A handle whose actor is at the other end of a link.

    Opening the link, what the other end reports while it comes up, and the end are left to those
    who know what is there.

    Args:
        cls: The actor's class.
        name: What logs and errors call the actor.
        options: Windows, limits and deadlines.
    """

    def __init__(self, cls: type[Actor], name: str, options: SpawnOptions) -> None:
        self.name = name
        self.contract = contract_of(cls)
        self._options = options
        self._caller = Caller(name, self.contract, options)
        self._tasks = OwnedTasks(name)
        self._channel: Channel | None = None
        self._link_lost = anyio.Event()
        self._arrived: dict[type, asyncio.Future[Any]] = {}
        self._is_closing = False
        self._on_death: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its actor is gone."""
        return self._caller.ended

    @property
    def in_flight(self) -> int:
        """Calls and streams that have not ended."""
        return self._caller.in_flight

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages sent so far."""
        return self._channel.sent if self._channel is not None else 0

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call a method over the link; see :meth:`ActorHandle.call`."""
        return self._caller.call(method, args, kwargs)

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> ActorStream:
        """Stream over the link; see :meth:`ActorHandle.stream`."""
        return self._caller.stream(method, args, kwargs)

    async def ping(self, seconds: float) -> bool:
        """Whether the event loop at the other end answers within so many seconds."""
        return await self._caller.ping(seconds)

    def when_dead(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the actor is lost; see :meth:`ActorHandle.when_dead`."""
        if self._caller.ended and not self._is_closing:
            asyncio.get_running_loop().call_soon(callback)
        self._on_death.append(callback)

    def _attach(self, channel: Channel) -> None:
        """Send over this channel, and take from it what calls and streams wait for."""
        self._channel = self._caller.channel = channel
        channel.handlers.update(self._caller.handlers)

    def _beat(self) -> None:
        """Make the other end show that it is there."""
        if self._channel is not None and not self._channel.is_lost:
            self._channel.send(messages.Ping(0))

    def _expect(self, kind: type) -> asyncio.Future[Any]:
        """What is settled when a message of this kind comes, or can come no more."""
        future = asyncio.get_running_loop().create_future()
        self._arrived[kind] = future
        return future

    def _settle(self, kind: type, error: Exception | None) -> None:
        future = self._arrived.get(kind)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def _forget_arrivals(self) -> None:
        """Let go of what nobody waits for any more."""
        for future in self._arrived.values():
            if not future.cancel() and not future.cancelled():
                future.exception()  # whoever waited has left

    def _false_version(self, version: int) -> ProtocolVersionError | None:
        """The error of a peer that speaks another version of the protocol, if it does."""
        local = messages.PROTOCOL_VERSION
        if version == local:
            return None
        return ProtocolVersionError(
            f"{self.name} speaks protocol version {version}, this side {local}",
            local=local,
            remote=version,
        )

    def _closed_error(self) -> ActorClosedError:
        return ActorClosedError(f"{self.name} is closed", actor=self.name)

    def _begin_close(self) -> None:
        """Fail what is in flight as closed; an end that comes after this is no death."""
        self._is_closing = True
        self._caller.end(self._closed_error)

    def _report_death(self) -> None:
        """Tell who asked, unless the handle was closed."""
        if not self._is_closing:
            for callback in self._on_death:
                callback()
