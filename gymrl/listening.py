"""How servers listen, how long they wait for their clients, and how they stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
from aiohttp import web

if TYPE_CHECKING:
    import socket

    from aiohttp.web_runner import BaseRunner

BACKLOG = 4096
"""Connections that may wait to be accepted; the kernel's ``somaxconn`` caps it.

Hundreds of rows connect at once; with a short queue some of them wait whole seconds.
"""


IDLE_S = 120.0
"""A connection without a request for so long is closed, also one whose headers have not all come.

It must be longer than clients keep connections for their next request: a few seconds by gymrl's and
the OpenAI client, 15 s by NeMo Gym. aiohttp's own is an hour.
"""

BODY_PAUSE_S = 60.0
"""A request whose body has stopped coming for so long gets HTTP 408, at the latest after twice that.

One that is slow, and comes, is waited for.
"""


async def read_body(request: web.Request, pause_s: float = BODY_PAUSE_S) -> bytes:
    """A request's whole body, as ``request.read()``, unless its client leaves off sending.

    Args:
        request: May be read again.
        pause_s: How long nothing of it may come.

    Raises:
        web.HTTPRequestTimeout: Nothing came for so long.
        web.HTTPRequestEntityTooLarge: It is larger than the application takes.
        web.RequestPayloadError: It is not packed as its headers say.
    """
    content = request.content
    if content.is_eof():  # most are here when their handler runs
        return await request.read()
    loop = asyncio.get_running_loop()
    scope = anyio.CancelScope()
    looking: asyncio.TimerHandle

    def look(seen: int) -> None:
        nonlocal looking
        if content.total_bytes == seen:
            scope.cancel()
        else:
            looking = loop.call_later(pause_s, look, content.total_bytes)

    with scope:
        looking = loop.call_later(pause_s, look, content.total_bytes)
        try:
            return await request.read()
        finally:
            looking.cancel()
    raise web.HTTPRequestTimeout(reason=f"nothing more of the body came for {pause_s:g} s")


class Door:
    """Where an application is reached; it closes without losing who is just coming in.

    asyncio accepts a connection in one turn of its loop and hands it to the server in the next. A
    server that closes between the two leaves the connection to nobody: its client waits until the
    garbage collector finds it (``ResourceWarning: unclosed transport``).

    Args:
        runner: Of the application, set up; whoever closes the door cleans it up.
        bound: Listened on from `open` on, and the door's from then.

    Attributes:
        port: That clients connect to.
    """

    def __init__(self, runner: BaseRunner, bound: socket.socket) -> None:
        self._bound = bound
        self._site = web.SockSite(runner, bound, backlog=BACKLOG)
        self._is_open = False
        self.port = int(bound.getsockname()[1])

    async def open(self) -> None:
        """Listen.

        One that fails, or is cancelled, leaves nothing open.

        Raises:
            OSError: Another socket was quicker to listen on the port.
        """
        try:
            await self._site.start()
        except BaseException:
            if self._bound.fileno() != -1:
                asyncio.get_running_loop().remove_reader(self._bound)
            self._bound.close()
            raise
        self._is_open = True

    async def close(self) -> None:
        """Refuse new connections; those that came go on. Safe to call twice.

        One that is cancelled has closed the door as well.
        """
        if not self._is_open:
            return
        self._is_open = False
        asyncio.get_running_loop().remove_reader(self._bound)
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        finally:
            await self._site.stop()  # at once: it waits for nothing
