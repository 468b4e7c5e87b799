"""Clients that leave off in the middle of a request, and those that are only slow."""

import asyncio
import contextlib

import anyio
import pytest
from aiohttp import web

from gymrl.addresses import bound_socket
from gymrl.listening import Door, read_body

HEAD = "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(pause_s, **settings):
    """A server that gives bodies back; how clients connect to it."""

    async def echo(request):
        body = await read_body(request, pause_s)
        return web.Response(body=body + await request.read())

    app = web.Application()
    app.router.add_post("/echo", echo)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, **settings)
    await runner.setup()
    door = Door(runner, bound_socket("127.0.0.1", 0))
    await door.open()
    streams = []

    async def connect():
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        streams.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in streams:
            writer.close()
        await door.close()
        await runner.cleanup()


@pytest.mark.parametrize("sent", ["", "half"])
async def test_a_body_that_does_not_come_gets_408_and_the_connection_is_closed(sent):
    async with serving(0.1, lingering_time=0.1) as connect:
        reader, writer = await connect()
        writer.write((HEAD + sent).encode())
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 nothing more of the body came for 0.1 s\r\n")


async def test_a_body_that_comes_slowly_is_waited_for():
    """Whole it takes longer than nothing may come: a client that was itself held up tries again."""
    pause_s = 0.5
    async with serving(pause_s) as connect:
        clock = asyncio.get_running_loop().time
        while True:
            reader, writer = await connect()
            writer.write(HEAD.encode())
            began, longest = clock(), 0.0
            for byte in b"0123456789":
                before = clock()
                await asyncio.sleep(0.1)
                writer.write(bytes([byte]))
                await writer.drain()
                longest = max(longest, clock() - before)
            if longest < pause_s / 2 and clock() - began > pause_s:
                break
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        assert (await reader.readuntil(b"\r\n\r\n")).endswith(b"\r\n\r\n")
        # The handler may read it again.
        assert await reader.readexactly(20) == b"0123456789" * 2


@pytest.mark.parametrize("sent", [b"", b"POST /echo HTTP/1.1\r\nHost: loc"])
async def test_a_connection_on_which_no_request_comes_is_closed(sent):
    async with serving(60, keepalive_timeout=0.1) as connect:
        reader, writer = await connect()
        writer.write(sent)
        assert await reader.read() == b""


async def test_a_body_over_the_limit_is_refused_while_it_comes():
    async with serving(60) as connect:
        reader, writer = await connect()
        writer.write(HEAD.replace("10", str(1 << 30)).encode())

        async def flood():
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()

        async with anyio.create_task_group() as group:
            group.start_soon(flood)
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            group.cancel_scope.cancel()
