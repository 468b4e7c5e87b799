"""The floor: what a raw msgpack echo over a socket pair costs, and what copying memory costs.

Each number is what the actors' numbers are compared to: nothing but msgspec, a socket pair, uvloop
and length prefixes, in a child process; and numpy's copy of a warm array.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
import numpy.typing as npt
import uvloop

if TYPE_CHECKING:
    from types import TracebackType

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


class RawEcho:
    """A child that echoes; use it inside ``async with``."""

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair()
        self._child = subprocess.Popen(  # noqa: ASYNC220  # started before anything is measured
            [sys.executable, __file__, "--serve", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        loop = asyncio.get_running_loop()
        self._transport, self._client = await loop.create_unix_connection(_Client, sock=ours)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._transport.close()
        self._child.kill()
        self._child.wait()

    async def call(self, value: object) -> object:
        """Send a value and wait for it to come back."""
        body = msgspec.msgpack.encode(value)
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._client.waiters.append(future)
        self._transport.write(_LENGTH.pack(len(body)) + body)
        return await future

    async def sequential(self, calls: int) -> float:
        """Seconds a round trip, one at a time."""
        start = time.perf_counter()
        for number in range(calls):
            await self.call(["add", number])
        return (time.perf_counter() - start) / calls


def copy_s(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], count: int) -> float:
    """Seconds of copying one warm array to another, so many times."""
    start = time.perf_counter()
    for _ in range(count):
        np.copyto(target, source)
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(int(sys.argv[-1]))
