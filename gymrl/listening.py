"""How servers stop listening."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    import socket

    from aiohttp.web_runner import BaseRunner

BACKLOG = 4096
"""Connections that may wait to be accepted; the kernel's ``somaxconn`` caps it.

Hundreds of rows connect at once; with a short queue some of them wait whole seconds.
"""


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

        Raises:
            OSError: Another socket was quicker to listen on the port.
        """
        try:
            await self._site.start()
        except OSError:
            self._bound.close()
            raise
        self._is_open = True

    async def close(self) -> None:
        """Refuse new connections; those that came go on. Safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        asyncio.get_running_loop().remove_reader(self._bound)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await self._site.stop()
