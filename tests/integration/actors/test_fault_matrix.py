"""Signals to workers and to drivers in every phase of life: typed ends, nothing left."""

# ruff: noqa: ASYNC220, PERF401, PT012
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import anyio
import psutil
import pytest

from gymrl.actors import SpawnOptions, spawn
from gymrl.concurrency import gather_bounded
from gymrl.errors import ActorDiedError, ActorStartError
from tests.integration.actors.faulty_actors import Parent, Phased, Stuck
from tests.integration.actors.watching import ROOT, all_end, is_running, said

PHASES = ["setup", "call", "stream", "close"]
# A worker that is stopped is found by these alone. It has to get to its phase before them.
OPTIONS = SpawnOptions(start_timeout_s=12.0, close_timeout_s=5.0, heartbeat_timeout_s=4.0)
PATIENT = SpawnOptions(start_timeout_s=60.0, close_timeout_s=60.0)


async def live_through(
    phase: str, reached: str, options: SpawnOptions = OPTIONS
) -> tuple[list[int], BaseException | None]:
    """The items that arrived, and the error that ended this life."""
    items: list[int] = []
    try:
        async with spawn(Phased, phase=phase, reached=reached, options=options) as phased:
            await phased.call("ready")
            if phase == "call":
                await phased.call("work")
            if phase == "stream":
                async for item in phased.stream("items"):
                    items.append(item)
    except Exception as error:  # noqa: BLE001  # what it is, is the result
        return items, error
    return items, None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
async def test_a_signal_to_a_worker_ends_every_phase_typed_and_leaves_nothing(
    number, tmp_path, caplog
):
    ends = {}
    options = OPTIONS if number == signal.SIGSTOP else PATIENT

    async def one(phase: str) -> None:
        reached = str(tmp_path / phase)
        pids = []

        async def strike() -> None:
            pids.extend(await said(reached))
            os.kill(pids[0], number)

        with anyio.fail_after(100):
            async with anyio.create_task_group() as group:
                group.start_soon(strike)
                ends[phase] = await live_through(phase, reached, options)
        assert len(pids) == 2
        assert await all_end(pids), phase

    await gather_bounded(one, PHASES)
    assert [type(ends[phase][1]) for phase in PHASES] == [
        ActorStartError,
        ActorDiedError,
        ActorDiedError,
        type(None),
    ]
    assert ends["stream"][0] == [0, 1, 2]
    started, called, streamed, _ = (ends[phase][1] for phase in PHASES)
    if number == signal.SIGSTOP:
        assert "start_timeout_s" in str(started)
        for error in (called, streamed):
            assert error.signal == signal.SIGKILL
            assert "heartbeat_timeout_s" in str(error)
        assert "did not close within 5 s" in caplog.text
    else:
        assert started.__cause__.signal == number
        assert (called.signal, streamed.signal) == (number, number)
        assert "close() did not run to its end" in caplog.text
        assert number.name in caplog.text


# What is started in the background of a script is born deaf to interrupts, and so are its children.
DRIVER = """
import asyncio, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {root!r})
from tests.integration.actors.test_fault_matrix import live_through

own = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(own.pid, flush=True)
asyncio.run(live_through(sys.argv[1], sys.argv[2]))
"""


class Driver:
    """A driver in one phase of its worker's life, with a process of its own beside it."""

    def __init__(self, phase: str, reached: str) -> None:
        self.reached = reached
        code = textwrap.dedent(DRIVER.format(root=ROOT))
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, phase, reached],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    async def __aenter__(self):
        self.own = int(await anyio.to_thread.run_sync(self.popen.stdout.readline))
        self.worker, _ = await said(self.reached)
        below = psutil.Process(self.popen.pid).children(recursive=True)
        self.tree = [process.pid for process in below if process.pid != self.own]
        assert self.worker in self.tree
        return self

    async def __aexit__(self, *exc):
        self.popen.kill()
        self.popen.wait()
        self.popen.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.own, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_the_driver_leaves_nothing_of_its_tree_in_any_phase(number, tmp_path):
    stranger = subprocess.Popen(["sleep", "300"])

    async def one(phase: str) -> None:
        async with Driver(phase, str(tmp_path / phase)) as driver:
            assert len(driver.tree) >= 3  # the worker, its guardian, and what it started
            os.kill(driver.popen.pid, number)
            assert await all_end([*driver.tree, driver.popen.pid]), phase
            assert is_running(driver.own), phase

    try:
        await gather_bounded(one, PHASES)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_stopped_worker_does_not_outlive_a_driver_that_is_killed(tmp_path):
    async with Driver("call", str(tmp_path / "call")) as driver:
        os.kill(driver.worker, signal.SIGSTOP)
        os.kill(driver.popen.pid, signal.SIGKILL)
        assert await all_end(driver.tree)


async def test_all_workers_dying_at_once_fail_every_call_and_stream_at_once():
    async with contextlib.AsyncExitStack() as stack:
        workers = await gather_bounded(
            lambda _: stack.enter_async_context(spawn(Stuck)), range(4), limit=2
        )
        ends = []

        async def call(worker) -> None:
            try:
                await worker.call("sleep", 60)
            except ActorDiedError as error:
                ends.append(error.signal)

        async def read(worker) -> None:
            try:
                async for _ in worker.stream("numbers"):
                    pass
            except ActorDiedError as error:
                ends.append(error.signal)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for worker in workers:
                    for _ in range(10):
                        group.start_soon(call, worker)
                        group.start_soon(read, worker)
                await anyio.sleep(0.3)
                for worker in workers:
                    os.kill(worker.pid, signal.SIGKILL)
        assert ends == [9] * 80


# --- a worker that is stopped, or stuck --------------------------------------------------------------


async def test_a_stopped_worker_without_a_heartbeat_is_waited_for_and_goes_on():
    async with spawn(Stuck) as stuck:
        async with anyio.create_task_group() as group:
            os.kill(stuck.pid, signal.SIGSTOP)
            group.start_soon(stuck.call, "sleep", 0.0)
            assert not await stuck.ping(0.3)
            assert stuck.in_flight == 1
            os.kill(stuck.pid, signal.SIGCONT)
        assert await stuck.ping(30)


async def test_a_heartbeat_ends_a_worker_that_blocks_and_spares_one_that_works():
    options = SpawnOptions(heartbeat_timeout_s=2.0)
    async with spawn(Stuck, options=options) as stuck:
        with anyio.fail_after(40):
            assert await stuck.call("sleep", 2.5) == "slept"
            await stuck.call("block", 0.3)
            with pytest.raises(ActorDiedError, match="heartbeat_timeout_s"):
                await stuck.call("block", 60)
        assert not is_running(stuck.pid)


async def test_a_driver_that_was_itself_away_does_not_take_its_worker_for_dead():
    options = SpawnOptions(heartbeat_timeout_s=1.6)
    async with spawn(Stuck, options=options) as stuck:
        for _ in range(2):
            time.sleep(2.0)  # noqa: ASYNC251  # a training step in the loop's own thread
            await anyio.sleep(0.5)
        assert await stuck.call("sleep", 0.0) == "slept"


# --- what a worker starts ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "exit", "exit_0", "kill", "segfault"])
async def test_whatever_a_worker_starts_ends_with_it_wherever_it_went(end):
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        async with spawn(Parent) as parent:
            pids = [await parent.call("start", how) for how in ("group", "session", "daemon")]
            assert all(map(is_running, pids))
            with contextlib.suppress(ActorDiedError):
                if end == "kill":
                    os.kill(parent.pid, signal.SIGKILL)
                    await parent.call("die", 0)
                elif end == "segfault":
                    await parent.call("die", signal.SIGSEGV)
                elif end != "close":
                    await parent.call("exit", 0 if end == "exit_0" else 3)
        assert await all_end(pids)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_daemons_of_a_worker_end_when_its_driver_is_killed():
    code = textwrap.dedent(
        f"""
        import asyncio, sys
        sys.path.insert(0, {ROOT!r})
        from gymrl.actors import spawn
        from tests.integration.actors.faulty_actors import Parent

        async def main():
            async with spawn(Parent) as parent:
                kinds = ("group", "session", "daemon")
                print(*[await parent.call("start", kind) for kind in kinds], flush=True)
                await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 3
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    assert await all_end(pids)


@pytest.mark.parametrize("newline", [True, False])
async def test_a_flood_with_or_without_lines_is_bounded_also_in_the_error_of_a_death(newline):
    async with spawn(Stuck) as stuck:
        before = psutil.Process().memory_info().rss
        with anyio.fail_after(40):
            assert await stuck.call("flood", 60, newline) == 60
            with pytest.raises(ActorDiedError) as died:
                os.kill(stuck.pid, signal.SIGKILL)
                await stuck.call("flood", 1, newline)
        assert psutil.Process().memory_info().rss - before < 48 << 20
        assert 0 < len(died.value.stderr) < 100_000
