"""Watching other processes, which send no events."""

# ruff: noqa: ASYNC110, ASYNC230
from __future__ import annotations

import asyncio
import gc
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = os.getcwd()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def all_end(pids: Iterable[int], seconds: float = 60.0) -> bool:
    """Whether these end; how long they may take guards against a hang alone."""
    pids = list(pids)
    with anyio.move_on_after(seconds):
        while any(map(is_running, pids)):
            await anyio.sleep(0.02)
        return True
    return False


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.01)


async def said(path: str, seconds: float = 60.0) -> list[int]:
    """The numbers that a worker writes into a file when it gets to its phase."""
    await until(lambda: os.path.exists(path), seconds)
    with open(path, encoding="utf-8") as file:
        return [int(word) for word in file.read().split()]


class Open(NamedTuple):
    """Everything of this process that a worker might leave behind.

    Children and tasks are told apart: one that was there before, and just ends, makes no room.
    """

    children: frozenset[psutil.Process]
    tasks: frozenset[asyncio.Task[Any]]
    threads: int
    descriptors: int
    segments: int

    def beside(self, before: Open) -> dict[str, int]:
        """How much of each kind there is that was not there before."""
        more = {
            "children": len(self.children - before.children),
            "tasks": len(self.tasks - before.tasks),
            "threads": self.threads - before.threads,
            "descriptors": self.descriptors - before.descriptors,
            "segments": self.segments - before.segments,
        }
        return {name: number for name, number in more.items() if number > 0}


def what_is_open() -> Open:
    gc.collect()
    process = psutil.Process()
    return Open(
        children=frozenset(process.children(recursive=True)),
        tasks=frozenset(asyncio.all_tasks() - {asyncio.current_task()}),
        threads=process.num_threads(),
        descriptors=process.num_fds(),
        segments=segments(),
    )


def segments() -> int:
    """Mappings of shared memory, named or not."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("memfd:gymrl" in line or "/dev/shm/" in line for line in file)


async def what_is_left(before: Open, seconds: float = 60.0) -> dict[str, int]:
    """What is open now and was not before; so many seconds are given to what is just ending."""
    left: dict[str, int] = {}
    with anyio.move_on_after(seconds):
        while left := what_is_open().beside(before):
            await anyio.sleep(0.05)
    return left
