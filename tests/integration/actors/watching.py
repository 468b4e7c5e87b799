"""Watching other processes, which send no events."""

# ruff: noqa: ASYNC110, ASYNC230
from __future__ import annotations

import asyncio
import gc
import os
from typing import TYPE_CHECKING

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


async def all_end(pids: Iterable[int], seconds: float = 5.0) -> bool:
    pids = list(pids)
    with anyio.move_on_after(seconds):
        while any(map(is_running, pids)):
            await anyio.sleep(0.02)
        return True
    return False


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.01)


async def said(path: str, seconds: float = 30.0) -> list[int]:
    """The numbers that a worker writes into a file when it gets to its phase."""
    await until(lambda: os.path.exists(path), seconds)
    with open(path, encoding="utf-8") as file:
        return [int(word) for word in file.read().split()]


def what_is_open() -> dict[str, int]:
    """Everything of this process that a worker might leave behind."""
    gc.collect()
    process = psutil.Process()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    return {
        "descriptors": process.num_fds(),
        "children": len(process.children(recursive=True)),
        "tasks": len(tasks),
        "threads": process.num_threads(),
        "segments": segments(),
    }


def segments() -> int:
    """Mappings of shared memory, named or not."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("memfd:gymrl" in line or "/dev/shm/" in line for line in file)


async def what_is_left(before: dict[str, int], seconds: float = 5.0) -> dict[str, int]:
    """What is open now and was not before; so many seconds are given to what is just ending."""
    left: dict[str, int] = {}
    with anyio.move_on_after(seconds):
        while True:
            now = what_is_open()
            left = {name: now[name] - before[name] for name in before if now[name] != before[name]}
            if not left:
                break
            await anyio.sleep(0.05)
    return left
