"""An agent that answers at once, in a process of its own, with as little work as HTTP allows."""

from __future__ import annotations

import asyncio

from benchmarks.rollout.answers import AGENT, Shape, answer
from gymrl.actors import Actor
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.registry import AGENTS, RegistryServer
from gymrl.listening import BACKLOG


class StubAgent(Actor):
    """Answers every ``POST /run`` with the same rollout, and serves a registry that names it."""

    async def setup(self, shape: Shape) -> None:
        """Make the answer, and listen."""
        body = answer(shape)
        head = (
            "HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        reply = head.encode() + body
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Http(reply), "127.0.0.1", 0, backlog=BACKLOG
        )
        port = self._server.sockets[0].getsockname()[1]
        self._run_url = f"http://127.0.0.1:{port}/run"
        registry = RegistryServer()
        block = {"stub": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}
        registry.publish({AGENT: {AGENTS: block}}, [{"process_name": AGENT, "port": port}])
        self._registry = Listener(registry.application(), PortRange())
        await self._registry.start()

    async def registry_url(self) -> str:
        """Address of the registry."""
        return self._registry.url

    async def run_url(self) -> str:
        """Where rows are posted."""
        return self._run_url

    async def close(self) -> None:
        """Stop listening."""
        self._server.close()
        await self._registry.stop()


class _Http(asyncio.Protocol):
    """One connection: reads requests by their ``Content-Length``, and replies to each."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (end := self._rest.find(b"\r\n\r\n")) >= 0:
            head = self._rest[:end].lower()
            place = head.find(b"content-length:")
            size = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            if len(self._rest) < end + 4 + size:
                return
            self._rest = self._rest[end + 4 + size :]
            self._transport.write(self._reply)
