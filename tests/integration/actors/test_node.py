"""Actors over TCP: mutual proof, expiry, and the same calls and streams."""

# ruff: noqa: ASYNC110
# The other end's state is polled, and streams raise while they are read.

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket

import anyio
import numpy as np
import pytest
import uvloop

from gymrl.actors import SpawnOptions, connect_actor, serve_actor
from gymrl.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorStartError,
    ActorStreamError,
    AuthenticationError,
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
)
from tests.integration.actors.sample_actors import Counter, Echo, Sleeper, Trouble

SECRET = b"a secret of at least 16 bytes"


async def test_calls_and_streams_work_over_tcp():
    async with serve_actor(Counter, secret=SECRET, start=3) as server:
        async with connect_actor(Counter, server.host, server.port, secret=SECRET) as counter:
            assert await counter.call("add", 4) == 7
            assert [i async for i in counter.stream("count", 300)] == list(range(300))
            assert await counter.ping(1)
        async with connect_actor(Counter, server.host, server.port, secret=SECRET) as counter:
            assert await counter.call("add", 1) == 8
        with pytest.raises(ActorClosedError):
            await counter.call("add", 1)


async def test_large_arrays_and_bytes_go_inline_over_tcp():
    async with serve_actor(Echo, secret=SECRET) as server:
        async with connect_actor(Echo, server.host, server.port, secret=SECRET) as echo:
            array = np.arange(3 << 20, dtype=np.int32)
            np.testing.assert_array_equal(await echo.call("array", array), array)
            body = os.urandom(7 << 20)
            assert await echo.call("body", body) == body


async def test_errors_are_the_same_over_tcp():
    async with serve_actor(Trouble, secret=SECRET) as server:
        async with connect_actor(Trouble, server.host, server.port, secret=SECRET) as trouble:
            with pytest.raises(KeyError):
                await trouble.call("raise_", "key")


@pytest.mark.parametrize("swapped", [False, True])
async def test_a_wrong_secret_is_refused_by_either_side(swapped):
    ours, theirs = SECRET, b"another secret of 16 bytes"
    if swapped:
        ours, theirs = theirs, ours
    async with serve_actor(Counter, secret=theirs) as server:
        with pytest.raises(AuthenticationError, match="same"):
            async with connect_actor(Counter, server.host, server.port, secret=ours):
                pass


async def test_a_server_that_cannot_prove_itself_is_refused():
    async def impostor(reader, writer):
        writer.write(b"gymrl-A1" + bytes(32))
        await reader.readexactly(64)
        writer.write(bytes(32))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(AuthenticationError, match="server does not know"):
            async with connect_actor(Counter, host, port, secret=SECRET):
                pass


async def test_a_peer_without_the_secret_never_gets_a_message_read():
    options = SpawnOptions(handshake_timeout_s=2.0)
    async with serve_actor(Counter, secret=SECRET, options=options) as server:
        for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n" * 20, os.urandom(64), bytes(64)):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            assert len(await reader.readexactly(40)) == 40
            writer.write(greeting)
            rest = b""
            with anyio.fail_after(30), contextlib.suppress(ConnectionResetError):
                rest = await reader.read()
            assert rest == b""
            writer.close()
        async with connect_actor(Counter, server.host, server.port, secret=SECRET) as counter:
            assert await counter.call("add", 1) == 1


async def test_other_servers_and_silent_ones_are_refused():
    async def http(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + bytes(40))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(http, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(ProtocolError, match="no gymrl"):
            async with connect_actor(Counter, host, port, secret=SECRET):
                pass
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        options = SpawnOptions(handshake_timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match="handshake_timeout_s"):
            async with connect_actor(Counter, host, port, secret=SECRET, options=options):
                pass
    with pytest.raises(ActorStartError, match="cannot be reached"):
        async with connect_actor(Counter, host, port, secret=SECRET):
            pass


async def test_another_class_and_a_short_secret_are_refused():
    with pytest.raises(ConfigError, match="16 bytes"):
        serve_actor(Counter, secret=b"short")
    async with serve_actor(Counter, secret=SECRET) as server:
        with pytest.raises(ActorStartError, match="Counter is served here, not Echo"):
            async with connect_actor(Echo, server.host, server.port, secret=SECRET):
                pass


async def test_a_lost_link_fails_calls_and_streams():
    async with serve_actor(Sleeper, secret=SECRET) as server, Stalling(server.port) as proxy:
        async with connect_actor(Sleeper, "127.0.0.1", proxy.port, secret=SECRET) as sleeper:
            stream = sleeper.stream("slow_numbers")
            await anext(stream)
            call = asyncio.get_running_loop().create_task(sleeper.call("sleep", 60))
            await anyio.sleep(0.1)
            proxy.cut()
            with anyio.fail_after(30):
                with pytest.raises(ActorDiedError, match="is lost"):
                    await call
                with pytest.raises(ActorStreamError, match="without end marker"):
                    async for _ in stream:
                        pass
            assert sleeper.closed


async def test_a_server_that_closes_ends_calls_and_streams():
    async with serve_actor(Sleeper, secret=SECRET) as server:
        async with connect_actor(Sleeper, server.host, server.port, secret=SECRET) as sleeper:
            stream = sleeper.stream("slow_numbers")
            await anext(stream)
            call = asyncio.get_running_loop().create_task(sleeper.call("sleep", 60))
            await anyio.sleep(0.1)
            await server.close()
            with anyio.fail_after(30):
                with pytest.raises(ActorClosedError, match="ended the call"):
                    await call
                with pytest.raises(ActorClosedError):
                    async for _ in stream:
                        pass
                with pytest.raises(ActorDiedError):
                    await sleeper.call("open_streams")


async def close_while_a_client_comes(turns: int) -> None:
    """The server closes so many turns of the loop after a client has connected."""
    async with serve_actor(Counter, secret=SECRET) as server:
        with socket.create_connection((server.host, server.port)) as client:
            client.settimeout(30)
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.to_thread(client.recv, 100):
                    pass


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_connection_that_comes_while_a_server_closes_is_closed_with_it(loop):
    """A coroutine that accepts, and is cancelled before it has handed over, lost the connection."""
    for turns in range(6):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(close_while_a_client_comes(turns))
        gc.collect()


async def test_what_a_client_has_under_way_ends_with_its_connection():
    async with serve_actor(Sleeper, secret=SECRET) as server:
        async with connect_actor(Sleeper, server.host, server.port, secret=SECRET) as observer:
            async with connect_actor(Sleeper, server.host, server.port, secret=SECRET) as sleeper:
                stream = sleeper.stream("slow_numbers")
                await anext(stream)
                assert await observer.call("open_streams") == 1
            with anyio.fail_after(30):
                while await observer.call("open_streams"):
                    await anyio.sleep(0.01)


async def test_a_peer_that_falls_silent_expires():
    options = SpawnOptions(keepalive_s=0.1, expiry_s=0.5)
    async with serve_actor(Sleeper, secret=SECRET) as server:
        async with Stalling(server.port) as proxy:
            handle = connect_actor(Sleeper, "127.0.0.1", proxy.port, secret=SECRET, options=options)
            async with handle as sleeper:
                assert await sleeper.call("open_streams") == 0
                await anyio.sleep(1.0)
                assert await sleeper.call("open_streams") == 0
                proxy.stalled = True
                with anyio.fail_after(30), pytest.raises(ActorDiedError, match="expiry_s"):
                    await sleeper.call("open_streams")


class Stalling:
    """A proxy that can stop passing bytes on."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.stalled = False

    async def __aenter__(self):
        self.writers = []
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc):
        self.server.close()
        self.cut()

    def cut(self):
        for writer in self.writers:
            writer.close()

    async def accept(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers += (writer, back)
        async with anyio.create_task_group() as group:
            group.start_soon(self.pump, reader, back)
            group.start_soon(self.pump, there, writer)

    async def pump(self, source, sink):
        while data := await source.read(65536):
            if not self.stalled:
                sink.write(data)
