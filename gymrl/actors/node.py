"""Actors on other nodes: the same messages over TCP, between peers that know one secret."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING, Any

import anyio

from gymrl.actors import messages
from gymrl.actors.actor import Actor, contract_of
from gymrl.actors.authentication import check_secret, prove_as_client, prove_as_server
from gymrl.actors.channel import Channel
from gymrl.actors.codec import RoundTrip
from gymrl.actors.expiry import fell_silent
from gymrl.actors.failures import start_error
from gymrl.actors.handle import ActorHandle
from gymrl.actors.link import Caller
from gymrl.actors.options import SpawnOptions
from gymrl.actors.service import ActorService, send_error
from gymrl.concurrency import OwnedTasks, deadline
from gymrl.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorError,
    ActorStartError,
    ActorStreamError,
    AuthenticationError,
    DeadlineExceeded,
    ProtocolError,
    ProtocolVersionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gymrl.actors.contract import ActorContract
    from gymrl.actors.streams import ActorStream

logger = logging.getLogger(__name__)

_BACKLOG = 128
# Connections of peers that have proved themselves, and of those that have not yet.
_MAX_SESSIONS = 1024
_MAX_UNPROVEN = 64


class ActorServer:
    """An actor in this process that other nodes connect to; see :func:`serve_actor`.

    Attributes:
        host: The address it listens on.
        port: The port, once it is open.
    """

    def __init__(
        self,
        cls: type[Actor],
        address: tuple[str, int],
        secret: bytes,
        options: SpawnOptions,
        setup: dict[str, Any],
    ) -> None:
        check_secret(secret)
        self.contract = contract_of(cls)
        self.host, self.port = address
        self.name = options.name or cls.__name__
        self._secret = secret
        self._options = options
        self._setup = self.contract.setup.bind((), setup, RoundTrip())
        self._actor = cls()
        self._tasks = OwnedTasks(self.name)
        self._unproven: dict[anyio.CancelScope, None] = {}
        self._sessions = 0
        self._refusals = _Refusals(self.name)
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> ActorServer:
        self._listener = socket.create_server(
            (self.host, self.port), family=_family(self.host), backlog=_BACKLOG
        )
        try:
            self._listener.setblocking(False)
            self.host, self.port = self._listener.getsockname()[:2]
            await self.contract.setup.invoke(self._actor, self._setup)
        except BaseException:
            self._listener.close()
            raise
        self._accepting = self._tasks.start(self._accept(self._listener), "accept")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening, end every connection, and run the actor's ``close``, bounded."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with anyio.CancelScope(shield=True):
            await self._tasks.close()
            listener.close()
            with anyio.move_on_after(self._options.close_timeout_s) as scope:
                await self._actor.close()
            if scope.cancelled_caught:
                logger.warning("%s.close took too long and was given up", self.name)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                self._refusals.note(f"cannot accept a connection: {error}")
                await anyio.sleep(0.1)
                continue
            peer = f"{address[0]}:{address[1]}"
            if len(self._unproven) >= _MAX_UNPROVEN:
                # The oldest goes: who knows the secret proves it at once, who does not waits.
                oldest = next(iter(self._unproven))
                oldest.cancel()
                del self._unproven[oldest]
            scope = anyio.CancelScope()
            self._unproven[scope] = None
            self._newest = self._tasks.start(self._session(sock, peer, scope), f"session-{peer}")

    async def _session(self, sock: socket.socket, peer: str, scope: anyio.CancelScope) -> None:
        try:
            proven = await self._prove(sock, peer, scope)
        except BaseException:
            sock.close()
            raise
        finally:
            self._unproven.pop(scope, None)
        if not proven:
            sock.close()
            return
        self._sessions += 1
        session = _Session(self._actor, self.contract, self.name)
        try:
            await session.serve(sock, self._options)
        finally:
            self._sessions -= 1
            await session.end()

    async def _prove(self, sock: socket.socket, peer: str, scope: anyio.CancelScope) -> bool:
        """Whether the peer knows the secret; nothing else that it says is read before."""
        seconds = self._options.handshake_timeout_s
        what = f"the proof of {peer}"
        try:
            sock.setblocking(False)
            with scope, deadline(seconds, what, "SpawnOptions.handshake_timeout_s"):
                await prove_as_server(sock, self._secret)
        except (AuthenticationError, DeadlineExceeded) as error:
            self._refusals.note(f"refuses {peer}: {error}")
            return False
        if scope.cancelled_caught:
            self._refusals.note(
                f"drops {peer}: over {_MAX_UNPROVEN} connections have not proved themselves"
            )
            return False
        if self._sessions >= _MAX_SESSIONS:
            self._refusals.note(f"refuses {peer}: {_MAX_SESSIONS} peers are connected")
            return False
        return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _Refusals:
    """Logs refused peers, at most one line a second: whoever floods us does not write our log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logged = float("-inf")
        self._left_out = 0

    def note(self, what: str) -> None:
        now = time.monotonic()
        if now - self._logged < 1:
            self._left_out += 1
            return
        more = f" ({self._left_out} like this before)" if self._left_out else ""
        logger.warning("%s %s%s", self._name, what, more)
        self._logged, self._left_out = now, 0


class _Session:
    """One connection to a served actor."""

    def __init__(self, actor: Actor, contract: ActorContract, name: str) -> None:
        self._actor = actor
        self._contract = contract
        self._name = name
        self._lost = anyio.Event()
        self._channel: Channel | None = None
        self._service: ActorService | None = None

    async def serve(self, sock: socket.socket, options: SpawnOptions) -> None:
        channel = await Channel.over(sock, options, None, self._on_message, self._on_lost)
        self._channel = channel
        channel.send(messages.Hello(messages.PROTOCOL_VERSION, 0))
        if await fell_silent(channel, options.expiry_s, self._lost):
            logger.warning(
                "%s: a peer has shown nothing for %g s (SpawnOptions.expiry_s) and is dropped",
                self._name,
                options.expiry_s,
            )

    async def end(self) -> None:
        """Cancel what runs for this connection, and close it."""
        if self._service is not None:
            await self._service.stop()
        if self._channel is not None:
            self._channel.close()
            with anyio.move_on_after(1.0, shield=True):
                await self._lost.wait()
            self._channel.abort()

    def _on_lost(self, error: Exception | None) -> None:
        if error is not None:
            logger.warning("%s: a link broke: %s", self._name, error)
        self._lost.set()

    def _on_message(
        self, head: Any, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        channel = self._channel
        assert channel is not None
        match head:
            case messages.Hello(version=version) if version == messages.PROTOCOL_VERSION:
                pass
            case messages.Start() if self._service is not None:
                channel.abort(ProtocolError("a second Start came over one link"))
            case messages.Start(qualname=qualname) if qualname == type(self._actor).__qualname__:
                self._service = ActorService(self._actor, self._contract, channel, self._name)
                channel.handlers.update(self._service.handlers)
                channel.send(messages.Ready())
            case messages.Start(qualname=qualname):
                served = type(self._actor).__qualname__
                # Nothing is imported for a peer: the one class that is served was chosen here.
                error = ActorStartError(f"{served} is served here, not {qualname[:100]}")
                send_error(channel, messages.Refused(), error)
            case _:
                channel.abort(ActorError(f"{type(head).__name__} came out of turn"))


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
        """Connect, prove and be proved to, and say which class is meant."""
        check_secret(secret)
        host, port = self._address
        seconds = self._options.handshake_timeout_s
        sock = socket.socket(_family(host))
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


def serve_actor(
    cls: type[Actor],
    *,
    secret: bytes,
    host: str = "127.0.0.1",
    port: int = 0,
    options: SpawnOptions | None = None,
    **setup: Any,
) -> ActorServer:
    """Serve an actor of this process to other nodes; use it with ``async with``.

    Any number of clients that know the secret may connect; they share the one actor. What a client
    has under way ends with its connection.

    Args:
        cls: The actor's class; clients import it too.
        secret: At least 16 random bytes, known to both sides.
        host: Address of the interface to listen on; loopback unless you say otherwise.
        port: 0 takes a free one; see `ActorServer.port`.
        options: Limits and deadlines.
        **setup: Arguments of the actor's ``setup``.

    Raises:
        ConfigError: The secret is too short.
        TypeError: Set-up arguments are missing or unknown.
        EncodeError: A set-up argument is not of its type.
        OSError: The address cannot be listened on.
    """
    return ActorServer(cls, (host, port), secret, options or SpawnOptions(), setup)


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
