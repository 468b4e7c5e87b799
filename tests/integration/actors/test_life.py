"""Birth and death of worker processes: nothing hangs, nothing is left, nothing else is touched."""

# ruff: noqa: ASYNC110, ASYNC220, PERF401, PT012
# These tests watch other processes, which send no events.
from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import warnings

import anyio
import psutil
import pytest

from gymrl.actors import SpawnOptions, spawn
from gymrl.errors import ActorDiedError, ActorStartError
from tests.integration.actors.broken_import import Unimportable
from tests.integration.actors.sample_actors import (
    BadClose,
    BadSetup,
    Counter,
    Mortal,
    Sleeper,
)
from tests.integration.actors.watching import (
    ROOT,
    all_end,
    is_running,
    what_is_left,
    what_is_open,
)


def children_called(name: str) -> list[psutil.Process]:
    """Children of this process with a name in their command lines."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in " ".join(child.cmdline()):
                found.append(child)
    return found


# --- death of a worker ---------------------------------------------------------------------------


async def test_a_worker_that_exits_fails_its_calls_with_code_and_last_lines():
    async with spawn(Mortal) as mortal:
        with anyio.fail_after(30), pytest.raises(ActorDiedError) as caught:
            await mortal.call("exit", 7)
        assert caught.value.exit_code == 7
        assert caught.value.signal is None
        assert "these are my last words" in caught.value.stderr
        assert "and these too" in str(caught.value)
        assert mortal.closed
        with pytest.raises(ActorDiedError):
            await mortal.call("pids")


@pytest.mark.parametrize(("way", "number"), [("kill", 9), ("segfault", 11)])
async def test_a_worker_that_is_killed_names_the_signal(way, number):
    async with spawn(Mortal) as mortal:
        with anyio.fail_after(30), pytest.raises(ActorDiedError) as caught:
            await mortal.call(way)
        assert caught.value.signal == number
        assert signal.Signals(number).name in str(caught.value)


async def test_a_stream_whose_worker_dies_gives_what_it_sent_and_then_the_death():
    async with spawn(Mortal) as mortal:
        items = []
        with anyio.fail_after(30), pytest.raises(ActorDiedError) as caught:
            async for item in mortal.stream("three_then_die"):
                items.append(item)
        assert items == [0, 1, 2]
        assert caught.value.exit_code == 4


async def test_a_link_that_closes_without_an_end_marker_is_an_error():
    # ray-project/ray#44357: a lost stream item must not wait for ever.
    async with spawn(Mortal) as mortal:
        items = []
        with anyio.fail_after(30), pytest.raises(ActorDiedError):
            async for item in mortal.stream("three_then_cut"):
                items.append(item)
        assert items == [0, 1, 2]
    assert not is_running(mortal.pid)


async def test_every_reader_sees_the_death_of_every_worker():
    # NVIDIA-NeMo/RL#3488: a consumer polled an empty buffer for hours.
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(spawn(Sleeper)) for _ in range(2)]
        deaths = []

        async def read(worker):
            try:
                async for _ in worker.stream("slow_numbers"):
                    pass
            except ActorDiedError as error:
                deaths.append(error.signal)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for worker in workers:
                    group.start_soon(read, worker)
                await anyio.sleep(0.2)
                for worker in workers:
                    os.kill(worker.pid, signal.SIGKILL)
        assert deaths == [9, 9]


async def test_what_a_dead_worker_started_is_ended_with_it():
    async with spawn(Mortal, children=2) as mortal:
        pids = await mortal.call("pids")
        with pytest.raises(ActorDiedError):
            await mortal.call("kill")
        assert await all_end(pids)


def test_a_driver_that_ignores_its_children_still_sees_them_die():
    code = textwrap.dedent(
        f"""
        import asyncio, signal, sys
        sys.path.insert(0, {ROOT!r})
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        from gymrl.actors import spawn
        from gymrl.errors import ActorDiedError
        from tests.integration.actors.sample_actors import Mortal

        async def main():
            async with spawn(Mortal) as mortal:
                try:
                    await mortal.call("kill")
                except ActorDiedError:
                    print("died")

        asyncio.run(main())
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "died\n", done.stderr


# --- birth -----------------------------------------------------------------------------------------


async def test_an_import_error_is_reported_with_its_traceback():
    # PrimeIntellect-ai/prime-rl#3139: a child died at start-up and its parent waited ten minutes.
    start = time.monotonic()
    with pytest.raises(ActorStartError, match="not for workers") as caught:
        await spawn(Unimportable)
    assert "broken_import.py" in caught.value.remote_traceback
    assert caught.value.remote_type == "ImportError"
    assert isinstance(caught.value.__cause__, ImportError)
    assert time.monotonic() - start < 45


async def test_a_set_up_that_exits_or_dies_is_a_start_error():
    with pytest.raises(ActorStartError, match="SystemExit"):
        await spawn(BadSetup, how="exit")
    with pytest.raises(ActorStartError, match="dying in set-up") as caught:
        await spawn(BadSetup, how="die")
    assert isinstance(caught.value.__cause__, ActorDiedError)
    assert caught.value.__cause__.exit_code == 6


async def test_a_set_up_that_hangs_ends_at_its_deadline():
    options = SpawnOptions(start_timeout_s=0.5, name="hanging")
    with pytest.raises(ActorStartError, match=r"hanging did not finish .* 0.5 s .*start_timeout_s"):
        await spawn(BadSetup, how="hang", options=options)
    assert not children_called("hanging")


async def test_a_cancelled_start_leaves_no_process():
    options = SpawnOptions(name="never-started")
    for delay in (0.0, 0.05, 0.3, 1.0):
        with anyio.move_on_after(delay):
            await spawn(BadSetup, how="hang", options=options)
        assert not children_called("never-started")


async def test_classes_that_a_worker_cannot_find_are_refused_at_spawn():
    class Local(Counter):
        pass

    with pytest.raises(ActorStartError, match="inside a function"):
        spawn(Local)
    async with spawn(Local, in_process=True) as local:
        assert await local.call("add", 1) == 1


# --- the end ---------------------------------------------------------------------------------------


async def test_closing_ends_the_process_and_all_it_started():
    stranger = subprocess.Popen(["sleep", "300"])
    try:
        for session in (False, True):
            async with spawn(Mortal, children=2, session=session) as mortal:
                pids = await mortal.call("pids")
                assert all(map(is_running, pids))
            assert await all_end(pids)
        # NVIDIA/TensorRT-LLM#16404: processes it never started were reached.
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("how", ["hang", "block", "thread"])
async def test_a_close_that_does_not_end_is_bounded(how):
    options = SpawnOptions(close_timeout_s=0.5)
    handle = await spawn(BadClose, how=how, options=options)
    with anyio.fail_after(30):
        with contextlib.suppress(TimeoutError):
            await handle.close()
    assert not is_running(handle.pid)


async def test_a_worker_stuck_in_a_call_is_ended_by_close():
    async with spawn(Mortal, options=SpawnOptions(close_timeout_s=0.5)) as mortal:
        task = asyncio.get_running_loop().create_task(mortal.call("block", 60))
        await anyio.sleep(0.2)
    with pytest.raises(Exception, match="closed"):
        await task
    assert not is_running(mortal.pid)


async def test_a_cancelled_close_still_ends_the_process():
    handle = await spawn(BadClose, how="hang", options=SpawnOptions(close_timeout_s=0.5))
    task = asyncio.get_running_loop().create_task(handle.close())
    await anyio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_running(handle.pid)


async def test_two_closes_at_once_are_one():
    handle = await spawn(Counter)
    async with anyio.create_task_group() as group:
        group.start_soon(handle.close)
        group.start_soon(handle.close)
    await handle.close()


async def test_nothing_is_left_after_many_workers():
    async with spawn(Counter):
        pass
    before = what_is_open()
    for _ in range(3):
        async with spawn(Counter) as counter:
            await counter.call("add", 1)
        with pytest.raises(ActorStartError):
            await spawn(BadSetup, how="raise")
        async with spawn(Mortal) as mortal:
            with pytest.raises(ActorDiedError):
                await mortal.call("exit", 1)
    assert await what_is_left(before) == {}


async def test_a_child_inherits_none_of_the_drivers_sockets():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        inode = os.readlink(f"/proc/self/fd/{server.fileno()}")
        async with spawn(Mortal) as mortal:
            assert inode not in await mortal.call("descriptors")


async def test_a_child_that_floods_its_stderr_neither_blocks_nor_bloats(caplog):
    caplog.set_level(logging.INFO, "gymrl.actors.output")
    async with spawn(Mortal, options=SpawnOptions(name="flooding")) as mortal:
        before = psutil.Process().memory_info().rss
        with anyio.fail_after(30):
            assert await mortal.call("flood", 300_000) == 300_000
        assert psutil.Process().memory_info().rss - before < 100 << 20
    lines = [r.getMessage() for r in caplog.records if r.name == "gymrl.actors.output"]
    assert lines
    assert all(line.startswith("[flooding] ") for line in lines)
    assert len(lines) < 30_000
    assert any("lines left out" in line for line in lines)


async def test_a_handle_that_is_forgotten_ends_its_process_and_says_so():
    def run():
        async def forget():
            handle = await spawn(Counter)
            return handle.pid

        return asyncio.run(forget())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        pid = await anyio.to_thread.run_sync(run)
        gc.collect()
    assert await all_end([pid])


# --- scripts, threads, and the death of the driver --------------------------------------------------

# What is started in the background of a script is born deaf to interrupts, and so are its children.
DRIVER = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {root!r})
from gymrl.actors import spawn
from tests.integration.actors.sample_actors import Mortal

async def main():
    async with spawn(Mortal, children=1) as a, spawn(Mortal, children=1, session=True) as b:
        print(*await a.call("pids"), *await b.call("pids"), flush=True)
        {then}

asyncio.run(main())
"""


def start_driver(then: str) -> subprocess.Popen[str]:
    code = DRIVER.format(root=ROOT, then=then)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "then",
    [
        "await asyncio.sleep(60)",
        "await a.call('block', 60)",
        "await asyncio.wait([asyncio.ensure_future(x.call('block', 60)) for x in (a, b)])",
    ],
    ids=["idle", "one_blocked", "both_blocked"],
)
async def test_nothing_outlives_a_driver_that_is_killed(then):
    stranger = subprocess.Popen(["sleep", "300"])
    driver = start_driver(then)
    try:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 4
        guardians = [c.pid for p in pids for c in psutil.Process(p).children()]
        await anyio.sleep(0.2)
        driver.kill()
        driver.wait()
        assert await all_end(pids + guardians)
        assert stranger.poll() is None
    finally:
        driver.stdout.close()
        driver.kill()
        driver.wait()
        stranger.kill()
        stranger.wait()


async def test_a_worker_stuck_with_the_interpreter_lock_does_not_outlive_its_driver(tmp_path):
    module = tmp_path / "stuck_actor.py"
    module.write_text(
        textwrap.dedent(
            """
            import re
            from gymrl.actors import Actor

            class Stuck(Actor):
                async def hold(self) -> None:
                    re.match(r"(a+)+$", "a" * 60 + "b")  # holds the lock for hours
            """
        )
    )
    code = textwrap.dedent(
        f"""
        import asyncio, sys
        sys.path[:0] = [{ROOT!r}, {str(tmp_path)!r}]
        from gymrl.actors import spawn
        from stuck_actor import Stuck

        async def main():
            async with spawn(Stuck) as stuck:
                print(stuck.pid, flush=True)
                await stuck.call("hold")

        asyncio.run(main())
        """
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(driver.stdout.readline())
        await anyio.sleep(0.5)
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    assert await all_end([pid])


async def test_a_fork_of_the_driver_does_not_keep_workers_alive():
    # The fork holds the write end of the death pipe, and the driver's end of the link.
    fork = "import os, time; forked = os.fork(); forked or time.sleep(300)"
    driver = start_driver(
        f"exec({fork!r}, globals()); print(forked, flush=True); await asyncio.sleep(60)"
    )
    forked = 0
    try:
        pids = [int(word) for word in driver.stdout.readline().split()]
        forked = int(driver.stdout.readline())
        driver.kill()
        driver.wait()
        assert await all_end(pids)
        assert is_running(forked)
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
        if forked:
            os.kill(forked, signal.SIGKILL)


async def test_an_interrupted_driver_closes_its_workers():
    driver = start_driver("await asyncio.sleep(60)")
    try:
        pids = [int(word) for word in driver.stdout.readline().split()]
        driver.send_signal(signal.SIGINT)
        assert await all_end([*pids, driver.pid])
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


@pytest.mark.parametrize("delay", [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0])
async def test_nothing_outlives_a_driver_that_is_killed_while_workers_start(delay):
    mark = f"starting-{os.getpid()}-{delay}"
    code = textwrap.dedent(
        f"""
        import asyncio, sys
        sys.path.insert(0, {ROOT!r})
        from gymrl.actors import SpawnOptions, spawn
        from tests.integration.actors.sample_actors import BadSetup, Mortal

        async def one():
            await spawn(Mortal, children=1, options=SpawnOptions(name={mark!r}))

        async def main():
            print("go", flush=True)
            await asyncio.gather(*[one() for _ in range(3)])
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout.readline() == "go\n"
    await anyio.sleep(delay)
    tree = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert await all_end([process.pid for process in tree])
    with anyio.fail_after(30):
        while any(
            mark in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])
        ):
            await anyio.sleep(0.05)


async def test_workers_live_on_when_the_thread_that_started_them_ends():
    # A child with PR_SET_PDEATHSIG would die with the thread.
    loop = asyncio.new_event_loop()
    handles = []

    def start():
        handles.append(loop.run_until_complete(spawn(Counter).open()))

    def use():
        time.sleep(0.5)

        async def main():
            assert await handles[0].call("add", 2) == 2
            await handles[0].close()

        loop.run_until_complete(main())
        loop.close()

    import threading

    for target in (start, use):
        errors = []

        def run(target=target, errors=errors):
            try:
                target()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        assert not errors


SCRIPT = """
import asyncio
import sys

sys.path.insert(0, {root!r})
print("the script runs")

from gymrl.actors import Actor, spawn

FACTOR = 3


class Tripler(Actor):
    async def triple(self, n: int) -> int:
        return n * FACTOR


async def main():
    async with spawn(Tripler) as tripler:
        print(await tripler.call("triple", 7))


{start}
"""


@pytest.mark.parametrize(
    "start", ["asyncio.run(main())", 'if __name__ == "__main__":\n    asyncio.run(main())']
)
def test_a_script_is_not_run_again_in_its_workers(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=ROOT, start=start))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "the script runs\n21\n", done.stderr
    assert done.returncode == 0


def test_a_script_whose_definitions_start_work_is_refused_with_a_reason(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=ROOT, start="result = asyncio.run(main())"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ActorStartError" in done.stderr
    assert "__main__" in done.stderr


def test_python_c_can_use_actors_of_modules_and_says_why_not_its_own():
    code = textwrap.dedent(
        f"""
        import asyncio, sys
        sys.path.insert(0, {ROOT!r})
        from gymrl.actors import Actor, spawn
        from gymrl.errors import ActorStartError
        from tests.integration.actors.sample_actors import Counter

        class Own(Actor):
            async def nothing(self) -> None: ...

        async def main():
            async with spawn(Counter) as counter:
                print(await counter.call("add", 2))
            async with spawn(Own, in_process=True) as own:
                print(await own.call("nothing"))
            try:
                spawn(Own)
            except ActorStartError as error:
                print(error)

        asyncio.run(main())
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert (first, second) == ("2", "None")
    assert "move the class to a module" in third


def test_python_m_finds_the_classes_of_its_module(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "near.py").write_text("NUMBER = 5\n")
    (tmp_path / "pack" / "tool.py").write_text(
        SCRIPT.format(root=ROOT, start="asyncio.run(main())").replace(
            "FACTOR = 3", "from .near import NUMBER as FACTOR"
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "pack.tool"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout == "the script runs\n35\n", done.stderr


def test_a_driver_with_threads_and_sockets_starts_workers(tmp_path):
    # xorbitsai/inference#5095: fork and threads do not mix; workers are executed anew.
    code = textwrap.dedent(
        f"""
        import asyncio, sys, threading, time, aiohttp
        sys.path.insert(0, {ROOT!r})
        from gymrl.actors import spawn
        from gymrl.concurrency import gather_bounded
        from tests.integration.actors.sample_actors import Counter

        for _ in range(4):
            threading.Thread(target=lambda: [time.sleep(0.01) for _ in range(400)], daemon=True).start()

        async def one(n):
            async with spawn(Counter, start=n) as counter:
                return await counter.call("add", 1)

        async def main():
            async with aiohttp.ClientSession():
                print(await gather_bounded(one, range(3)))

        asyncio.run(main())
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[1, 2, 3]\n", done.stderr
