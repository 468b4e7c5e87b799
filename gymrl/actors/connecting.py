"""Connecting to an actor that another node serves; see :mod:`gymrl.actors.node`."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

import anyio

from gymrl.actors import messages
from gymrl.actors.authentication import check_secret, prove_as_client
from gymrl.actors.channel import Channel
from gymrl.actors.expiry import fell_silent
from gymrl.actors.failures import start_error
from gymrl.actors.linked import LinkedHandle
from gymrl.actors.options import SpawnOptions
from gymrl.addresses import address_family
from gymrl.concurrency import deadline
from gymrl.errors import ActorDiedError, ActorError, ActorStartError, ActorStreamError

if TYPE_CHECKING:
    from gymrl.actors.actor import Actor
    from gymrl.actors.handle import ActorHandle

logger = logging.getLogger(__name__)


class NodeHandle(LinkedHandle):
    """A handle whose actor is served on another node."""

    def __init__(self, cls: type[Actor], address: tuple[str, int], options: SpawnOptions) -> None:
        super().__init__(cls, options.name or f"{cls.__name__}@{address[0]}:{address[1]}", options)
        self._qualname = cls.__qualname__
        self._address = address
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """0: the process is not on this node."""
        return 0

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
                self._attach(channel)
                ready = self._expect(messages.Ready)
                channel.send(messages.Hello(messages.PROTOCOL_VERSION, 0))
                channel.send(messages.Start("", self._qualname, None, False, self.name))
                await ready
        except BaseException:
            await self.close()
            sock.close()
            raise
        self._keeping = self._tasks.start(self._keep_alive(channel), "keepalive")

    async def _keep_alive(self, channel: Channel) -> None:
        seconds, every_s = self._options.expiry_s, self._options.keepalive_s
        if await fell_silent(channel, seconds, self._link_lost, self._beat, every_s):
            channel.abort(ActorError(f"nothing came for {seconds:g} s (SpawnOptions.expiry_s)"))

    def _on_message(
        self, head: Any, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        match head:
            case messages.Hello(version=version):
                if error := self._false_version(version):
                    self._settle(messages.Ready, error)
            case messages.Ready():
                self._settle(messages.Ready, None)
            case messages.Refused():
                refusal = start_error(self._caller.decode_error(payload), self.name)
                self._settle(messages.Ready, refusal)
            case _:
                logger.debug("%s sent %s", self.name, type(head).__name__)

    def _on_lost(self, error: Exception | None) -> None:
        self._link_lost.set()
        name, closing = self.name, self._is_closing
        reason = f": {error}" if error is not None else ""

        def died() -> Exception:
            if closing:
                return self._closed_error()
            return ActorDiedError(f"the link to {name} is lost{reason}", actor=name)

        def broke(label: str) -> Exception:
            if closing:
                return self._closed_error()
            return ActorStreamError(f"{label}: the stream ended without end marker{reason}")

        self._caller.end(died, broke)
        self._settle(messages.Ready, died())
        self._report_death()

    def kill(self) -> None:
        """Cut the link; what is in flight fails. The actor stays with its server."""
        if self._channel is not None:
            self._channel.abort()

    async def close(self) -> None:
        """Close the link. The actor stays with its server. Safe to call twice."""
        self._begin_close()
        with anyio.CancelScope(shield=True):
            if self._channel is not None:
                self._channel.close()
                with anyio.move_on_after(self._options.close_timeout_s):
                    await self._link_lost.wait()
                self._channel.abort()
            await self._tasks.close()
        self._forget_arrivals()


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
