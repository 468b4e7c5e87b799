"""An aiohttp application on a socket of its own."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gymrl.addresses import bound_socket
from gymrl.browsers import guard
from gymrl.errors import ConfigError, ServerStartError
from gymrl.listening import IDLE_S, Door

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHUTDOWN_S = 0.5


class PortRange(msgspec.Struct, frozen=True):
    """Where to listen.

    Attributes:
        host: The address.
        low: First port to try; None takes a free one.
        high: Last port to try.
    """

    host: str = "127.0.0.1"
    low: int | None = None
    high: int | None = None

    def fixed(self, host: object, port: object) -> PortRange:
        """This range, or the host and port that a server's own settings name.

        Raises:
            ConfigError: They are no host, no port.
        """
        if host is not None and not isinstance(host, str):
            raise ConfigError(f"host={host!r}: must be a string", setting="host")
        if port is not None and (type(port) is not int or not 0 <= port < 65536):
            raise ConfigError(f"port={port!r}: must be a port", setting="port")
        chosen = host or self.host
        if not port:
            return PortRange(chosen, self.low, self.high)
        return PortRange(chosen, port, port)

    def candidates(self) -> Iterable[int]:
        """Ports to try, in order."""
        if self.low is None or self.high is None:
            return (0,)
        return range(self.low, self.high + 1)


class Listener:
    """Serves an application until it is stopped, to programs and not to web pages.

    A client that closes its connection cancels the handler that serves it, so that work nobody
    waits for ends.

    Args:
        app: The application.
        ports: Where to listen.
    """

    def __init__(self, app: web.Application, ports: PortRange) -> None:
        self._app = app
        self._ports = ports
        self._runner: web.AppRunner | None = None
        self._door: Door | None = None
        self._address: tuple[str, int] | None = None

    @property
    def url(self) -> str:
        """``http://host:port`` once it listens; a `RuntimeError` before."""
        if self._address is None:
            raise RuntimeError("this server does not listen yet")
        host, port = self._address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            ServerStartError: No port of the range is free.
            OSError: The address cannot be listened on.
        """
        self._app.middlewares.insert(0, guard(self._ports.host))
        runner = web.AppRunner(
            self._app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_S,
            keepalive_timeout=IDLE_S,
        )
        await runner.setup()
        self._runner = runner
        for port in self._ports.candidates():
            try:
                self._door = Door(runner, bound_socket(self._ports.host, port))
                await self._door.open()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._address = (self._ports.host, self._door.port)
            return
        raise ServerStartError(
            f"no port from {self._ports.low} to {self._ports.high} is free on {self._ports.host}"
        )

    async def stop(self) -> None:
        """Stop listening and cancel what is being served. Safe to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            if self._door is not None:
                await self._door.close()
            await runner.cleanup()
