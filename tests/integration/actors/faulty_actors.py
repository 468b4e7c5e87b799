"""Actors with faults; a worker imports them from here by name."""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC221, ASYNC230, ASYNC251, PT017
# These actors misbehave on purpose.
from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gymrl.actors import Actor

DAEMON = """
import os, subprocess, sys
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
os.execvp("sleep", ["sleep", "300"])
"""


class Phased(Actor):
    """Stays in one phase of its life until something happens to it, and tells when it is there."""

    async def setup(self, phase: str, reached: str = "") -> None:
        self.phase = phase
        self.reached = reached
        self.child = subprocess.Popen(["sleep", "300"])
        await self.wait_in("setup")

    async def wait_in(self, phase: str) -> None:
        if phase == self.phase:
            if self.reached:
                self.tell(f"{os.getpid()} {self.child.pid}")
            await asyncio.sleep(300)

    def tell(self, text: str) -> None:
        part = f"{self.reached}.part"
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(part, self.reached)

    async def ready(self) -> int:
        return self.child.pid

    async def work(self) -> None:
        await self.wait_in("call")

    async def items(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await self.wait_in("stream")

    async def close(self) -> None:
        await self.wait_in("close")


class Parent(Actor):
    """Starts processes that leave it in several ways."""

    async def start(self, how: str) -> int:
        if how == "daemon":
            before = daemons()
            subprocess.run([sys.executable, "-c", DAEMON], check=True)
            while not (new := daemons() - before):
                await asyncio.sleep(0.01)
            return new.pop()
        return subprocess.Popen(["sleep", "300"], start_new_session=how == "session").pid

    async def die(self, number: int) -> None:
        os.kill(os.getpid(), number)

    async def exit(self, code: int) -> None:
        os._exit(code)


def daemons() -> set[int]:
    mark = f"GYMRL_WORKER={os.environ['GYMRL_WORKER']}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry)
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                is_sleep = file.read().startswith(b"sleep\0")
            with open(f"/proc/{pid}/environ", "rb") as file:
                if is_sleep and mark in file.read().split(b"\0"):
                    found.add(pid)
    return found


class Odd(Exception):
    def __init__(self, first: object, second: object) -> None:
        super().__init__(first, second)
        self.held = open(os.devnull)  # noqa: SIM115  # what can't be pickled is the point

    def __del__(self) -> None:
        self.held.close()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Hostile(Exception):
    """Its attributes raise even what is no Exception."""

    @property
    def args(self):
        raise KeyboardInterrupt

    def __str__(self) -> str:
        raise SystemExit(3)


class OwnBase(BaseException):
    pass


def deep_group(depth: int) -> ExceptionGroup:
    group = ExceptionGroup("level 0", [ValueError("core")])
    for level in range(1, depth):
        group = ExceptionGroup(f"level {level}", [group, KeyError(level)])
    return group


def long_chain(length: int) -> Exception:
    error: Exception = ValueError("link 0")
    for number in range(1, length):
        following = ValueError(f"link {number}")
        following.__cause__ = error
        error = following
    return error


def http_error() -> Exception:
    url = URL("http://env.example/run")
    request = aiohttp.RequestInfo(url, "POST", CIMultiDictProxy(CIMultiDict(a="b")), url)
    headers = CIMultiDictProxy(CIMultiDict({"Retry-After": "3"}))
    return aiohttp.ClientResponseError(
        request, (), status=503, message="Service Unavailable", headers=headers
    )


ERRORS: dict[str, Any] = {
    "own_base": lambda: OwnBase("below Exception"),
    "odd": lambda: Odd(1, 2),
    "mute": Mute,
    "hostile": Hostile,
    "ten_megabytes": lambda: ValueError("x" * 10_000_000),
    "ten_megabytes_of_fields": lambda: ValueError(*["y" * 1000] * 10_000),
    "group": lambda: ExceptionGroup("both", [KeyError("a"), Mute(), Odd(3, 4)]),
    "base_group": lambda: BaseExceptionGroup("base", [KeyboardInterrupt(), ValueError("b")]),
    "deep_group": lambda: deep_group(500),
    "wide_group": lambda: ExceptionGroup("wide", [ValueError(n) for n in range(10_000)]),
    "long_chain": lambda: long_chain(50_000),
    "generator_exit": lambda: GeneratorExit("g"),
    "stop": lambda: StopIteration(7),
    "recursion": lambda: RecursionError("deep"),
    "memory": lambda: MemoryError("none left"),
    "class_from_exec": lambda: type("Ünmöglich\n", (Exception,), {"__module__": None})("odd name"),
    "huge_errno": lambda: OSError(-(2**63) - 1, "", ""),
    "null_byte": lambda: ValueError("a\0b\ud800c"),
    "http": http_error,
}


class Raiser(Actor):
    async def fail(self, kind: str) -> None:
        raise ERRORS[kind]()

    async def fail_late(self, kind: str) -> AsyncIterator[int]:
        yield 1
        raise ERRORS[kind]()

    async def fail_when_cancelled(self, kind: str) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ERRORS[kind]() from None

    async def fail_when_left(self, kind: str) -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0.01)
        finally:
            raise ERRORS[kind]()

    async def row(self, row: int) -> int:
        await asyncio.sleep(0.001 * (row % 7))
        if row == 57:
            raise KeyError("x")
        return row

    async def any(self, value: Any) -> Any:
        return value

    async def fine(self) -> str:
        return "fine"


class Producer(Actor):
    async def setup(self) -> None:
        self.open = 0
        self.awake = asyncio.Event()

    async def numbers(self, count: int, size: int = 0) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            for number in range(count):
                yield number.to_bytes(4, "big") + bytes(size)
        finally:
            self.open -= 1

    async def endless(self) -> AsyncIterator[int]:
        self.open += 1
        try:
            number = 0
            while True:
                yield number
                number += 1
                await asyncio.sleep(0)
        finally:
            self.open -= 1

    async def stubborn(self) -> AsyncIterator[int]:
        """Goes on when it was cancelled, until it is woken."""
        self.open += 1
        try:
            yield 1
            while not self.awake.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.awake.wait()
        finally:
            self.open -= 1

    async def wake(self) -> None:
        self.awake.set()

    async def open_streams(self) -> int:
        return self.open

    async def tasks(self) -> int:
        return len(asyncio.all_tasks()) - 1


class Poor(Actor):
    """Runs out of things."""

    async def limit(self, name: str, soft: int) -> None:
        kind = getattr(resource, name)
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))

    async def take_descriptors(self) -> int:
        self.taken = []
        try:
            while True:
                self.taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
        return len(self.taken)

    async def give_descriptors_back(self) -> None:
        for descriptor in self.taken:
            os.close(descriptor)

    async def make(self, size: int) -> npt.NDArray[np.uint8]:
        return np.ones(size, np.uint8)

    async def total(self, array: npt.NDArray[np.uint8]) -> int:
        return int(array.sum())

    async def allocate(self, size: int) -> int:
        return len(bytearray(size))


class Stuck(Actor):
    async def block(self, seconds: float) -> None:
        time.sleep(seconds)

    async def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    async def numbers(self) -> AsyncIterator[int]:
        number = 0
        while True:
            yield number
            number += 1
            await asyncio.sleep(0.01)

    async def flood(self, megabytes: int, newline: bool) -> int:
        line = b"x" * 199 + (b"\n" if newline else b"x")
        for _ in range(megabytes):
            os.write(2, line * 5000)
        return megabytes

    async def close(self) -> None:
        sys.stderr.write("closed\n")


class BadEnd(Actor):
    async def setup(self, how: str) -> None:
        self.how = how

    async def close(self) -> None:
        if self.how == "system_exit":
            raise SystemExit(4)
        if self.how == "own_base":
            raise OwnBase("at close")
        os.kill(os.getpid(), signal.SIGKILL)


class Environ(Actor):
    async def value(self, name: str) -> str | None:
        return os.environ.get(name)

    async def argv(self) -> list[str]:
        with open("/proc/self/cmdline", encoding="utf-8") as file:
            return file.read().split("\0")

    async def spill(self) -> None:
        raise ValueError("something else went wrong")


class Secretive(Actor):
    async def setup(self, api_key: str) -> None:
        self.api_key = api_key

    async def use(self, api_key: str, number: int) -> int:
        return number

    async def argv(self) -> list[str]:
        with open("/proc/self/cmdline", encoding="utf-8") as file:
            return file.read().split("\0")

    async def environ(self) -> list[str]:
        with open("/proc/self/environ", encoding="utf-8", errors="replace") as file:
            return file.read().split("\0")

    async def die(self) -> None:
        os._exit(9)


class Tiny(Actor):
    async def ping_back(self, n: int) -> int:
        return n
