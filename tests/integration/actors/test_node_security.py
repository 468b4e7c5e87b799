"""Peers that do not know the secret get nowhere, slowly or in numbers; those that do are bounded."""

# ruff: noqa: ASYNC251
# The other end's state is polled; blocking the loop is what one test is about.
from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import subprocess
import sys
import time

import anyio
import psutil
import pytest
import uvloop

from gymrl.actors import SpawnOptions, connect_actor, messages, serve_actor
from gymrl.actors.frames import HEADER, MAGIC, FrameWriter
from gymrl.errors import ActorDiedError, ActorStartError, AuthenticationError
from tests.integration.actors.faulty_actors import Producer, Stuck, Tiny
from tests.integration.actors.watching import ROOT, until

SECRET = b"a secret of at least 16 bytes"
GREETING = 40


async def greeted(server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    greeting = await reader.readexactly(GREETING)
    assert greeting.startswith(b"gymrl-A1")
    return reader, writer, greeting[8:]


async def is_refused(reader: asyncio.StreamReader) -> bool:
    """Whether the other side closes without another byte."""
    with anyio.fail_after(30), contextlib.suppress(ConnectionResetError):
        return await reader.read() == b""
    return True


async def works(server) -> bool:
    async with connect_actor(Tiny, server.host, server.port, secret=SECRET) as tiny:
        return await tiny.call("ping_back", 3) == 3


def client_proof(nonce: bytes, mine: bytes, secret: bytes = SECRET, role: bytes = b"client"):
    return hmac.digest(secret, b"gymrl-A1" + role + nonce + mine, "sha256")


async def proven(server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has proved itself, and may now say anything."""
    reader, writer, nonce = await greeted(server)
    mine = os.urandom(32)
    writer.write(mine + client_proof(nonce, mine))
    assert await reader.readexactly(32) == client_proof(nonce, mine, role=b"server")
    return reader, writer


async def test_a_wrong_secret_and_a_proof_of_the_wrong_role_are_refused():
    async with serve_actor(Tiny, secret=SECRET) as server:
        for secret, role in ((b"another secret, 16+", b"client"), (SECRET, b"server")):
            reader, writer, nonce = await greeted(server)
            mine = os.urandom(32)
            writer.write(mine + client_proof(nonce, mine, secret, role))
            assert await is_refused(reader)
            writer.close()
        assert await works(server)


async def test_a_recorded_proof_does_not_open_a_second_connection():
    recorded = bytearray()
    async with serve_actor(Tiny, secret=SECRET) as server:

        async def tap(reader, writer):
            there, back = await asyncio.open_connection(server.host, server.port)
            with contextlib.closing(writer), contextlib.closing(back):
                writer.write(await there.readexactly(GREETING))
                recorded.extend(await reader.readexactly(64))
                back.write(recorded)
                async with anyio.create_task_group() as group:
                    for source, sink in ((there, writer), (reader, back)):
                        group.start_soon(pump, source, sink)

        async def pump(source, sink):
            with contextlib.suppress(ConnectionResetError):
                while data := await source.read(65536):
                    sink.write(data)
            sink.close()

        async with await asyncio.start_server(tap, "127.0.0.1", 0) as proxy:
            host, port = proxy.sockets[0].getsockname()
            async with connect_actor(Tiny, host, port, secret=SECRET) as tiny:
                assert await tiny.call("ping_back", 1) == 1
        assert len(recorded) == 64
        for _ in range(3):
            reader, writer, _ = await greeted(server)
            writer.write(bytes(recorded) + b"and a call")
            assert await is_refused(reader)
            writer.close()


async def test_a_server_is_not_its_own_oracle():
    """Reflection: what one connection proves is of no use on another, in either role."""
    async with serve_actor(Tiny, secret=SECRET) as server:
        # A victim server's challenge, answered with what the same server says elsewhere.
        reader, writer, nonce = await greeted(server)
        other_reader, other_writer, other_nonce = await greeted(server)
        other_writer.write(nonce + other_nonce)  # its own words sent back
        assert await is_refused(other_reader)
        writer.write(other_nonce + client_proof(other_nonce, nonce, b"guess" * 4))
        assert await is_refused(reader)
        writer.close()
        other_writer.close()


async def test_a_client_sends_nothing_to_a_server_that_reflects_its_proof():
    seen = bytearray()

    async def reflector(reader, writer):
        with contextlib.closing(writer), contextlib.suppress(ConnectionResetError):
            writer.write(b"gymrl-A1" + os.urandom(32))
            said = await reader.readexactly(64)
            writer.write(said[32:])  # the client's own proof, as the server's
            seen.extend(await reader.read())

    async with await asyncio.start_server(reflector, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(AuthenticationError, match="server does not know"):
            async with connect_actor(Tiny, host, port, secret=SECRET):
                pass
    assert seen == b""


async def test_a_slow_peer_is_dropped_at_the_deadline_however_it_drips():
    options = SpawnOptions(handshake_timeout_s=1.0)
    async with serve_actor(Tiny, secret=SECRET, options=options) as server:
        reader, writer, _ = await greeted(server)
        with anyio.fail_after(45), contextlib.suppress(OSError):
            for _ in range(60):  # fewer than a proof has
                writer.write(b"x")
                await writer.drain()
                await anyio.sleep(0.3)
                if reader.at_eof():
                    break
            else:
                pytest.fail("each drip put the deadline off")
        assert await is_refused(reader)
        writer.close()
        assert await works(server)


async def test_a_huge_frame_before_the_proof_is_neither_read_nor_made_room_for():
    before = psutil.Process().memory_info().rss
    async with serve_actor(Tiny, secret=SECRET) as server:
        for _ in range(5):
            reader, writer, _ = await greeted(server)
            writer.write(HEADER.pack(MAGIC, 0, 3, 1 << 31, 0) + bytes(1 << 20))
            assert await is_refused(reader)
            writer.close()
        assert await works(server)
    assert psutil.Process().memory_info().rss - before < 64 << 20


async def test_a_flood_of_silent_connections_is_bounded_and_keeps_nobody_out(caplog):
    options = SpawnOptions(handshake_timeout_s=30.0)
    async with serve_actor(Tiny, secret=SECRET, options=options) as server:
        async with connect_actor(Tiny, server.host, server.port, secret=SECRET) as earlier:
            before = psutil.Process().num_fds()
            flood = []
            for number in range(300):
                sock = socket.create_connection((server.host, server.port))
                sock.setblocking(False)
                flood.append(sock)
                if number % 20 == 0:
                    await anyio.sleep(0.01)
            await until(lambda: psutil.Process().num_fds() - before <= 300 + 70)
            assert await works(server)
            assert await earlier.call("ping_back", 1) == 1
            for sock in flood:
                sock.close()
        refusals = [record for record in caplog.records if "have not proved" in record.getMessage()]
        assert 1 <= len(refusals) < 30
        await until(lambda: psutil.Process().num_fds() <= before)


@pytest.mark.parametrize(
    ("told", "host"), [({}, "127.0.0.1"), ({"host": "127.0.0.2"}, "127.0.0.2")]
)
async def test_it_listens_where_it_is_told_and_on_loopback_otherwise(told, host):
    async with serve_actor(Tiny, secret=SECRET, **told) as server:
        assert server.host == host
        # Of this process alone: another one may have the same port on another address.
        listening = [
            connection.laddr.ip
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == server.port
        ]
        assert listening == [host]


# --- peers that know the secret ----------------------------------------------------------------------


def framed(*heads: messages.Message) -> bytes:
    writer = FrameWriter(1 << 20)
    for head in heads:
        writer.write(head)
    return b"".join(writer.take())


async def test_a_peer_cannot_have_another_class_or_module_loaded():
    async with serve_actor(Tiny, secret=SECRET) as server:
        for module, qualname in (("os", "system"), ("antigravity", "x"), ("", "Tiny.__init__")):
            reader, writer = await proven(server)
            start = messages.Start(module, qualname, "/etc/passwd", True, "n")
            writer.write(framed(messages.Hello(messages.PROTOCOL_VERSION, 0), start))
            with anyio.fail_after(30):
                answer = await reader.readuntil(b"is served here")
            assert b"Tiny is served here" in answer
            writer.close()
        assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "bad",
    [
        framed(messages.Call(1, "ping_back")),
        framed(messages.Start("", "Tiny", None, False, "n"), messages.Start("", "Tiny", None, False, "n")),
        framed(messages.Result(1)),
        framed(messages.Closed()),
        framed(messages.Hello(99, 0)),
        HEADER.pack(MAGIC, 0, 3, 1 << 40, 0),
        HEADER.pack(MAGIC, 1, 3, 100, 0) + bytes(100),
        HEADER.pack(MAGIC, 0, 64 << 10, 0, 0) + bytes(64 << 10),
        b"\xff" * 5000,
    ],
)  # fmt: skip
async def test_a_peer_that_breaks_the_protocol_loses_its_link_alone(bad):
    async with serve_actor(Tiny, secret=SECRET) as server:
        async with connect_actor(Tiny, server.host, server.port, secret=SECRET) as other:
            reader, writer = await proven(server)
            writer.write(bad)
            with anyio.fail_after(30), contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
            assert await other.call("ping_back", 2) == 2


async def test_one_number_for_two_calls_ends_the_link():
    async with serve_actor(Stuck, secret=SECRET) as server:
        reader, writer = await proven(server)
        frames = FrameWriter(1 << 20)
        frames.write(messages.Start("", "Stuck", None, False, "n"))
        for _ in range(2):
            frames.write(messages.Call(7, "sleep"), {"seconds": 60.0})
        writer.write(b"".join(frames.take()))
        with anyio.fail_after(30), contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_a_peer_that_does_not_read_is_held_back_by_its_windows():
    options = SpawnOptions(stream_window=8, stream_window_bytes=8 << 20)
    async with serve_actor(Producer, secret=SECRET, options=options) as server:
        before = psutil.Process().memory_info().rss
        _, writer = await proven(server)
        frames = FrameWriter(1 << 20)
        frames.write(messages.Start("", "Producer", None, False, "n"))
        for number in range(1, 5):
            frames.write(
                messages.Open(number, "numbers", 8, 8 << 20), {"count": 1000, "size": 1 << 20}
            )
        writer.write(b"".join(frames.take()))
        await anyio.sleep(0.7)
        assert psutil.Process().memory_info().rss - before < 200 << 20
        writer.close()


async def test_texts_of_a_peer_are_echoed_in_brief():
    async with serve_actor(Tiny, secret=SECRET) as server:
        reader, writer = await proven(server)
        writer.write(framed(messages.Start("", "X" * 60_000, None, False, "n")))
        with anyio.fail_after(30):
            await reader.readuntil(b"is served here")
            assert len(await reader.read(1 << 20)) < 4000
        writer.close()


def test_a_pause_of_this_side_is_not_taken_for_the_others_silence():
    # uvloop runs due timers before it reads, so a clock alone would find the peer silent.
    async def main() -> None:
        options = SpawnOptions(keepalive_s=0.2, expiry_s=0.8)
        async with serve_actor(Tiny, secret=SECRET, options=options) as server:
            handle = connect_actor(Tiny, server.host, server.port, secret=SECRET, options=options)
            async with handle as tiny:
                for _ in range(2):
                    time.sleep(1.2)
                    await anyio.sleep(0.3)
                assert await tiny.call("ping_back", 4) == 4

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_a_served_actor_that_blocks_expires_for_its_clients():
    """A stopped process on another node is seen like one whose link is cut."""
    code = f"""
import asyncio, sys
sys.path.insert(0, {ROOT!r})
from gymrl.actors import serve_actor
from tests.integration.actors.faulty_actors import Stuck
async def main():
    async with serve_actor(Stuck, secret={SECRET!r}) as server:
        print(server.port, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    node = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(await anyio.to_thread.run_sync(node.stdout.readline))
        options = SpawnOptions(keepalive_s=0.2, expiry_s=1.0)
        async with connect_actor(Stuck, "127.0.0.1", port, secret=SECRET, options=options) as stuck:
            with anyio.fail_after(30), pytest.raises(ActorDiedError, match="expiry_s"):
                await stuck.call("stop")
    finally:
        node.kill()
        node.wait()
        node.stdout.close()
    with pytest.raises(ActorStartError, match="cannot be reached"):
        async with connect_actor(Stuck, "127.0.0.1", port, secret=SECRET):
            pass


async def test_addresses_of_the_sixth_version_are_taken_as_they_are():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        host = "127.0.0.1"  # a machine without them
    else:
        host = "::1"
    async with serve_actor(Tiny, secret=SECRET, host=host) as server:
        assert server.host == host
        assert await works(server)
