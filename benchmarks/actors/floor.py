"""The floor: what a raw msgpack echo over a socket pair costs here, and what copying memory costs.

Each number is what the actors' numbers are compared to: nothing but msgspec, a socket pair, uvloop
and length prefixes, in a child process; and numpy's copy of a warm array.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time

import msgspec
import numpy as np
import uvloop

_LENGTH = struct.Struct("<I")


class _Echo(asyncio.Protocol):
    def __init__(self) -> None:
        self.rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        asyncio.get_running_loop().stop()

    def data_received(self, data: bytes) -> None:
        data = self.rest + data
        place = 0
        answers = []
        while len(data) - place >= 4:
            (size,) = _LENGTH.unpack_from(data, place)
            if len(data) - place - 4 < size:
                break
            body = msgspec.msgpack.encode(
                msgspec.msgpack.decode(data[place + 4 : place + 4 + size])
            )
            answers.append(_LENGTH.pack(len(body)) + body)
            place += 4 + size
        self.rest = data[place:]
        if answers:
            self.transport.write(b"".join(answers))


class _Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.waiters: list[asyncio.Future[object]] = []
        self.rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        data = self.rest + data
        place = 0
        while len(data) - place >= 4:
            (size,) = _LENGTH.unpack_from(data, place)
            if len(data) - place - 4 < size:
                break
            value = msgspec.msgpack.decode(data[place + 4 : place + 4 + size])
            place += 4 + size
            self.waiters.pop(0).set_result(value)
        self.rest = data[place:]


def serve(descriptor: int) -> None:
    """The echoing child."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket(fileno=descriptor)
        await loop.create_unix_connection(_Echo, sock=sock)
        await loop.create_future()

    with contextlib.suppress(RuntimeError):
        uvloop.run(main())


async def _round_trips(calls: int) -> float:
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(  # noqa: ASYNC220  # started before anything is measured
        [sys.executable, __file__, "--serve", str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_unix_connection(_Client, sock=ours)

    async def call(value: object) -> object:
        body = msgspec.msgpack.encode(value)
        future = loop.create_future()
        client.waiters.append(future)
        transport.write(_LENGTH.pack(len(body)) + body)
        return await future

    await call(["add", 1])
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for number in range(calls):
            await call(["add", number])
        best = min(best, (time.perf_counter() - start) / calls)
    transport.close()
    child.kill()
    child.wait()
    return best


def round_trip_s(calls: int = 5000) -> float:
    """Seconds of one raw msgpack echo, one at a time."""
    return float(uvloop.run(_round_trips(calls)))


def copy_bytes_per_s(size: int = 64 << 20) -> float:
    """Bytes a second of copying one warm array to another."""
    source = np.ones(size, np.uint8)
    target = np.zeros(size, np.uint8)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return size / best


def main() -> None:
    """Print the floor as JSON."""
    print(
        json.dumps(
            {
                "round_trip_us": round_trip_s() * 1e6,
                "copy_gb_per_s": copy_bytes_per_s() / 1e9,
                "cpus": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(int(sys.argv[-1]))
    else:
        main()
