"""Serving an actor to other nodes: the same messages over TCP, to peers that know the secret."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

import anyio

from gymrl.actors import messages
from gymrl.actors.actor import Actor, contract_of
from gymrl.actors.authentication import check_secret, prove_as_server
from gymrl.actors.channel import Channel
from gymrl.actors.codec import RoundTrip
from gymrl.actors.expiry import fell_silent
from gymrl.actors.options import SpawnOptions
from gymrl.actors.service import ActorService, send_error
from gymrl.addresses import address_family
from gymrl.concurrency import OwnedTasks, deadline
from gymrl.errors import (
    ActorError,
    ActorStartError,
    AuthenticationError,
    DeadlineExceeded,
    ProtocolError,
)
from gymrl.telemetry import RateLimitedLog

if TYPE_CHECKING:
    from gymrl.actors.contract import ActorContract

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
        self._refusals = RateLimitedLog(logger, interval_s=1.0)
        self._arrived: set[socket.socket] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> ActorServer:
        self._listener = socket.create_server(
            (self.host, self.port), family=address_family(self.host), backlog=_BACKLOG
        )
        try:
            self._listener.setblocking(False)
            self.host, self.port = self._listener.getsockname()[:2]
            await self.contract.setup.invoke(self._actor, self._setup)
        except BaseException:
            self._listener.close()
            raise
        self._accept_from(self._listener)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening, end every connection, and run the actor's ``close``, bounded."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        asyncio.get_running_loop().remove_reader(listener)
        if self._resuming is not None:
            self._resuming.cancel()
        listener.close()
        with anyio.CancelScope(shield=True):
            await self._tasks.close()
            # Of sessions that were cancelled before their first step.
            for sock in self._arrived:
                sock.close()
            with anyio.move_on_after(self._options.close_timeout_s) as scope:
                await self._actor.close()
            if scope.cancelled_caught:
                logger.warning("%s.close took too long and was given up", self.name)

    def _note(self, what: str) -> None:
        # At most one line a second: whoever floods us does not write our log.
        self._refusals.log("refused", logging.WARNING, "%s %s", self.name, what)

    def _accept_from(self, listener: socket.socket) -> None:
        # Not by the loop's own coroutine: one that is cancelled when it has accepted a connection
        # and not yet handed it over leaves it to nobody, and its client waiting.
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # it has left again
        except OSError as error:
            self._note(f"cannot accept a connection: {error}")
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            self._resuming = loop.call_later(0.1, self._accept_from, listener)
            return
        peer = f"{address[0]}:{address[1]}"
        self._arrived.add(sock)
        self._newest = self._tasks.start(self._session(sock, peer), f"session-{peer}")

    async def _session(self, sock: socket.socket, peer: str) -> None:
        self._arrived.discard(sock)
        if len(self._unproven) >= _MAX_UNPROVEN:
            # The oldest goes: who knows the secret proves it at once, who does not waits.
            oldest = next(iter(self._unproven))
            oldest.cancel()
            del self._unproven[oldest]
        scope = anyio.CancelScope()
        self._unproven[scope] = None
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
            self._note(f"refuses {peer}: {error}")
            return False
        if scope.cancelled_caught:
            self._note(f"drops {peer}: over {_MAX_UNPROVEN} connections have not proved themselves")
            return False
        if self._sessions >= _MAX_SESSIONS:
            self._note(f"refuses {peer}: {_MAX_SESSIONS} peers are connected")
            return False
        return True


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
