"""Actors that the tests of this folder start; a worker imports them from here by name."""

# ruff: noqa: ASYNC220, ASYNC251, T201
# These actors misbehave on purpose.
from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gymrl.actors import Actor
from gymrl.errors import ContextOverflowError, GymTransportError


class Point(msgspec.Struct, frozen=True):
    x: int
    label: str = ""


class Cargo(msgspec.Struct):
    name: str
    token_ids: npt.NDArray[np.int32]
    body: bytes = b""


class Counter(Actor):
    async def setup(self, start: int = 0) -> None:
        self.value = start

    async def add(self, n: int, times: int = 1) -> int:
        self.value += n * times
        return self.value

    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i


class Echo(Actor):
    async def any(self, value: Any) -> Any:
        return value

    async def point(self, point: Point) -> Point:
        return Point(point.x + 1, point.label)

    async def cargo(self, cargo: list[Cargo]) -> list[Cargo]:
        return cargo

    async def array(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    async def body(self, body: bytes) -> bytes:
        return body

    async def lies(self) -> int:
        return "not an int"  # type: ignore[return-value]

    async def untravelling(self) -> Any:
        return {"deep": [threading.Lock()]}

    async def large(self, size: int) -> bytes:
        return bytes(size)


class Keeping(Actor):
    async def setup(self, table: bytes) -> None:
        self.table = table

    async def look_up(self, key: int) -> int:
        return self.table[key]


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.lock = threading.Lock()


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


class Trouble(Actor):
    """Raises whatever it is asked for."""

    async def raise_(self, kind: str) -> None:
        if kind == "circular":
            first, second = ValueError("first"), ValueError("second")
            first.__cause__, second.__cause__ = second, first
            raise first
        if kind == "local":

            class Local(Exception):
                pass

            raise Local("local text")
        raise {
            "key": KeyError("x"),
            "two": TwoArguments(1, 2),
            "speechless": Speechless(),
            "long": ValueError("x" * 10_000_000),
            "exit": SystemExit(3),
            "interrupt": KeyboardInterrupt(),
            "base": BaseException("base text"),
            "cancelled": asyncio.CancelledError(),
            "stop": StopAsyncIteration("stop text"),
            "group": ExceptionGroup("many", [KeyError("a"), TwoArguments(3, 4)]),
            "overflow": ContextOverflowError("too long", prompt_tokens=9, max_model_len=8),
            "transport": GymTransportError("503", status=503, url="http://a/run", body="busy"),
            "oserror": FileNotFoundError(2, "No such file", "/nowhere"),
            "surrogate": ValueError("bad \ud800 text"),
        }[kind]

    async def nested(self) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    async def stream(self, kind: str) -> AsyncIterator[int]:
        yield 1
        await self.raise_(kind)


class Sleeper(Actor):
    """Waits, and remembers what became of its calls."""

    async def setup(self) -> None:
        self.events: list[str] = []
        self.awake = asyncio.Event()
        self.open = 0

    async def sleep(self, seconds: float) -> str:
        self.events.append("started")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        return "slept"

    async def deaf(self) -> None:
        """Hears no cancellation; goes on until it is woken."""
        self.events.append("deaf")
        while not self.awake.is_set():
            try:
                await self.awake.wait()
            except asyncio.CancelledError:
                self.events.append("ignored")
        self.events.append("done")

    async def wake(self) -> None:
        self.awake.set()

    async def history(self) -> list[str]:
        return self.events

    async def numbers(self, size: int = 0) -> AsyncIterator[bytes]:
        self.open += 1
        made = 0
        try:
            while True:
                self.events.append(f"made {made}")
                yield bytes(size)
                made += 1
        finally:
            self.open -= 1
            self.events.append("closed")

    async def slow_numbers(self) -> AsyncIterator[int]:
        self.open += 1
        try:
            for number in range(1000):
                yield number
                await asyncio.sleep(0.02)
        finally:
            self.open -= 1

    async def open_streams(self) -> int:
        return self.open


def open_files() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


class Mortal(Actor):
    """Dies in many ways."""

    async def setup(self, children: int = 0, session: bool = False) -> None:
        self.children = [
            subprocess.Popen(["sleep", "300"], start_new_session=session) for _ in range(children)
        ]

    async def pids(self) -> list[int]:
        return [os.getpid(), *[child.pid for child in self.children]]

    async def exit(self, code: int) -> None:
        print("these are my last words")
        sys.stderr.write("and these too\n")
        os._exit(code)

    async def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def segfault(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    async def exit_on(self, payload: int) -> int:
        if payload == 13:
            os._exit(13)
        await asyncio.sleep(0.01)
        return payload

    async def three_then_die(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await asyncio.sleep(0.05)
        os._exit(4)

    async def three_then_cut(self) -> AsyncIterator[int]:
        """Closes the link's socket, and lives on."""
        for number in range(3):
            yield number
        await asyncio.sleep(0.05)
        for name, target in open_files().items():
            if target.startswith("socket:"):
                os.close(int(name))
        await asyncio.sleep(60)

    async def flood(self, lines: int) -> int:
        for _ in range(lines):
            sys.stderr.write("x" * 200 + "\n")
        return lines

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)

    async def descriptors(self) -> list[str]:
        return list(open_files().values())


class BadSetup(Actor):
    async def setup(self, how: str) -> None:
        if how == "raise":
            raise ValueError("the set-up failed")
        if how == "exit":
            sys.exit(5)
        if how == "die":
            print("dying in set-up")
            os._exit(6)
        if how == "hang":
            await asyncio.sleep(60)


class BadClose(Actor):
    async def setup(self, how: str) -> None:
        self.how = how

    async def close(self) -> None:
        if self.how == "raise":
            raise ValueError("close failed")
        if self.how == "hang":
            await asyncio.sleep(60)
        if self.how == "block":
            time.sleep(60)
        if self.how == "thread":
            threading.Thread(target=time.sleep, args=(60,)).start()
