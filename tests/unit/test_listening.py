"""What comes in while a server closes belongs to somebody."""

import asyncio
import gc
import socket

import anyio
import pytest
import uvloop
from aiohttp import web

from gymrl.addresses import bound_socket
from gymrl.listening import Door


async def close_while_a_client_comes() -> bytes:
    """The server turns to its closing between accepting a connection and serving it."""
    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
    await runner.setup()
    door = Door(runner, bound_socket("127.0.0.1", 0))
    await door.open()
    with socket.create_connection(("127.0.0.1", door.port)) as client:
        # In the first turn the connection is accepted, and the second is the door's.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await door.close()
        await door.close()
        await runner.cleanup()
        client.settimeout(5)
        return await asyncio.to_thread(client.recv, 1)


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_connection_that_comes_while_a_server_closes_is_closed_with_it(loop):
    with asyncio.Runner(loop_factory=loop) as turns:
        assert turns.run(close_while_a_client_comes()) == b""
    gc.collect()


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_nobody_comes_in_once_the_door_is_closed(loop):
    async def knock() -> None:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        door = Door(runner, bound_socket("127.0.0.1", 0))
        await door.open()
        await door.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", door.port)
        await runner.cleanup()

    with asyncio.Runner(loop_factory=loop) as turns:
        turns.run(knock())


async def test_a_door_whose_closing_is_cancelled_is_closed():
    runner = web.AppRunner(web.Application())
    await runner.setup()
    bound = bound_socket("127.0.0.1", 0)
    door = Door(runner, bound)
    await door.open()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await door.close()
    assert scope.cancelled_caught
    assert bound.fileno() == -1
    await runner.cleanup()


async def test_a_door_whose_opening_is_cancelled_leaves_nothing_open():
    runner = web.AppRunner(web.Application())
    await runner.setup()
    bound = bound_socket("127.0.0.1", 0)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await Door(runner, bound).open()
    assert scope.cancelled_caught
    assert bound.fileno() == -1
    await runner.cleanup()


async def test_of_two_sockets_of_one_port_the_second_is_refused_and_closed():
    runner = web.AppRunner(web.Application())
    await runner.setup()
    first = bound_socket("127.0.0.1", 0)
    second = bound_socket("127.0.0.1", first.getsockname()[1])
    door = Door(runner, first)
    await door.open()
    with pytest.raises(OSError, match="Address already in use"):
        await Door(runner, second).open()
    assert second.fileno() == -1
    await door.close()
    await runner.cleanup()
