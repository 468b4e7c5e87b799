"""Connecting to an actor that another node serves; see :mod:`gymrl.actors.node`."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

import anyio

from gymrl.actors import messages
from gymrl.actors.actor import Actor, contract_of
from gymrl.actors.authentication import check_secret, prove_as_client
from gymrl.actors.channel import Channel
from gymrl.actors.expiry import fell_silent
from gymrl.actors.failures import start_error
from gymrl.actors.handle import ActorHandle
from gymrl.actors.link import Caller
from gymrl.actors.options import SpawnOptions
from gymrl.addresses import address_family
from gymrl.concurrency import OwnedTasks, deadline
from gymrl.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorError,
    ActorStartError,
    ActorStreamError,
    ProtocolVersionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gymrl.actors.streams import ActorStream

logger = logging.getLogger(__name__)


class NodeHandle(ActorHandle):
    """A handle whose actor is served on another node."""

    def __init__(self, cls: type[Actor], address: tuple[str, int], options: SpawnOptions) -> None:
        self.contract = contract_of(cls)
        self.name = options.name or f"{cls.__name__}@{address[0]}:{address[1]}"
        self._qualname = cls.__qualname__
        self._address = address
        self._options = options
        self._caller = Caller(self.name, self.contract, options)
        self._tasks = OwnedTasks(self.name)
        self._channel: Channel | None = None
        self._lost = anyio.Event()
        self._ready: asyncio.Future[None] | None = None
        self._closing = False
        self._keeping: asyncio.Task[None] | None = None
        self._on_death: list[Callable[[], None]] = []

    @property
    def pid(self) -> int:
        """0: the process is not on this node."""
        return 0

    @property
    def closed(self) -> bool:
        """Whether it was closed, or the link is lost."""
        return self._caller.ended

    @property
    def in_flight(self) -> int:
        """Calls and streams that have not ended."""
        return self._caller.in_flight

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages sent so far."""
        return self._channel.sent if self._channel is not None else 0

    def when_dead(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the loop when the link is lost; at once, when it is."""
        if self._caller.ended and not self._closing:
            asyncio.get_running_loop().call_soon(callback)
        self._on_death.append(callback)

    async def ping(self, seconds: float) -> bool:
        """Whether the other node's event loop answers within so many seconds."""
        return await self._caller.ping(seconds)

    async def open(self, secret: bytes) -> None:
        """Connect, prove and be proved to, and say which class is meant.

        When this fails, or is cancelled, the connection is closed.

        Raises:
            Exception: What :func:`connect_actor` says of entering.
        """
        check_secret(secret)
        host, port = self._address
        seconds = self._options.handshake_timeout_s
        sock = socket.socket(address_family(host))
        sock.setblocking(False)
        what = f"the connection to {self.name}"
        try:
            with deadline(seconds, what, "SpawnOptions.handshake_timeout_s"):
                try:
                    await asyncio.get_running_loop().sock_connect(sock, (host, port))
                except OSError as error:
                    raise ActorStartError(
                        f"{self.name} cannot be reached at {host}:{port}: {error}", actor=self.name
                    ) from error
                await prove_as_client(sock, secret)
                channel = await Channel.over(
                    sock, self._options, None, self._on_message, self._on_lost
                )
                self._channel = self._caller.channel = channel
                channel.handlers.update(self._caller.handlers)
                self._ready = asyncio.get_running_loop().create_future()
                channel.send(messages.Hello(messages.PROTOCOL_VERSION, 0))
                channel.send(messages.Start("", self._qualname, None, False, self.name))
                await self._ready
        except BaseException:
            await self.close()
            sock.close()
            raise
        self._keeping = self._tasks.start(self._keep_alive(channel), "keepalive")

    async def _keep_alive(self, channel: Channel) -> None:
        seconds = self._options.expiry_s

        def beat() -> None:
            if not channel.is_lost:
                channel.send(messages.Ping(0))

        if await fell_silent(channel, seconds, self._lost, beat, self._options.keepalive_s):
            channel.abort(ActorError(f"nothing came for {seconds:g} s (SpawnOptions.expiry_s)"))

    def _on_message(
        self, head: Any, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        match head:
            case messages.Hello(version=version) if version != messages.PROTOCOL_VERSION:
                self._settle(
                    ProtocolVersionError(
                        f"{self.name} speaks protocol version {version}, this side "
                        f"{messages.PROTOCOL_VERSION}",
                        local=messages.PROTOCOL_VERSION,
                        remote=version,
                    )
                )
            case messages.Ready():
                self._settle(None)
            case messages.Refused():
                self._settle(start_error(self._caller.decode_error(payload), self.name))
            case _:
                logger.debug("%s sent %s", self.name, type(head).__name__)

    def _settle(self, error: Exception | None) -> None:
        if self._ready is None or self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _on_lost(self, error: Exception | None) -> None:
        self._lost.set()
        name, closing = self.name, self._closing
        reason = f": {error}" if error is not None else ""

        def died() -> Exception:
            if closing:
                return ActorClosedError(f"{name} is closed", actor=name)
            return ActorDiedError(f"the link to {name} is lost{reason}", actor=name)

        def broke(label: str) -> Exception:
            if closing:
                return died()
            return ActorStreamError(f"{label}: the stream ended without end marker{reason}")

        self._caller.end(died, broke)
        self._settle(died())
        if not closing:
            for callback in self._on_death:
                callback()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call a method on the other node; see :meth:`ActorHandle.call`."""
        return self._caller.call(method, args, kwargs)

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> ActorStream:
        """Stream from the other node; see :meth:`ActorHandle.stream`."""
        return self._caller.stream(method, args, kwargs)

    def kill(self) -> None:
        """Cut the link; what is in flight fails. The actor stays with its server."""
        if self._channel is not None:
            self._channel.abort()

    async def close(self) -> None:
        """Close the link. The actor stays with its server. Safe to call twice."""
        self._closing = True
        name = self.name
        self._caller.end(lambda: ActorClosedError(f"{name} is closed", actor=name))
        with anyio.CancelScope(shield=True):
            if self._channel is not None:
                self._channel.close()
                with anyio.move_on_after(self._options.close_timeout_s):
                    await self._lost.wait()
                self._channel.abort()
            await self._tasks.close()


def connect_actor(
    cls: type[Actor], host: str, port: int, *, secret: bytes, options: SpawnOptions | None = None
) -> Connecting:
    """Connect to an actor on another node; ``async with`` gives the handle.

    Closing the handle closes the link only. There is no shared memory on such a link.

    Args:
        cls: The class that is served there.
        host: Where it is served.
        port: Where it is served.
        secret: The same bytes as there.
        options: Limits, deadlines, `keepalive_s` and `expiry_s`.

    Raises:
        ConfigError: The secret is too short.
        AuthenticationError: On entering: one side does not know the secret.
        ActorStartError: On entering: nothing answers, or another class is served.
        DeadlineExceeded: On entering: it took longer than `handshake_timeout_s`.
    """
    check_secret(secret)
    return Connecting(cls, (host, port), secret, options or SpawnOptions())


class Connecting:
    """A connection that is about to be made; see :func:`connect_actor`."""

    def __init__(
        self, cls: type[Actor], address: tuple[str, int], secret: bytes, options: SpawnOptions
    ) -> None:
        self._cls = cls
        self._address = address
        self._secret = secret
        self._options = options
        self._handle: NodeHandle | None = None

    async def __aenter__(self) -> ActorHandle:
        handle = NodeHandle(self._cls, self._address, self._options)
        await handle.open(self._secret)
        self._handle = handle
        return handle

    async def __aexit__(self, *exc: object) -> None:
        if self._handle is not None:
            await self._handle.close()
