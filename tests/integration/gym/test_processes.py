"""Processes that end with this one, and ports that nobody else gets."""

import os
import socket
import sys

import anyio
import psutil
import pytest

from gymrl.errors import ServerStartError
from gymrl.gym.processes import GuardedProcess
from gymrl.gym.real_processes import ReservedPort

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
sys.stdout.write(f"{child.pid} {away.pid}\\n")
sys.stdout.flush()
time.sleep(600)
"""


def python(code, **settings):
    return GuardedProcess(
        "program", [sys.executable, "-c", code], cwd="/", env=dict(os.environ), **settings
    )


async def said(process):
    with anyio.fail_after(40):
        while not process.last_lines:  # noqa: ASYNC110 - a pipe tells nobody else of a line
            await anyio.sleep(0.02)
    return process.last_lines


async def test_a_process_tells_how_it_ended_and_what_it_said_last():
    ends = []
    process = python(
        "print('good'); print('bye'); raise SystemExit(3)", on_exit=lambda: ends.append(1)
    )
    await process.start()
    with anyio.fail_after(40):
        await process.wait()
    assert process.how_it_ended == "ended with exit code 3"
    assert process.exit_code == 3
    assert process.last_lines == "good\nbye"
    assert ends == [1]
    await process.stop()


async def test_a_guard_has_no_other_environment_than_its_process():
    process = GuardedProcess(
        "program",
        [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"],
        cwd="/",
        env={"ONLY": "this"},
    )
    await process.start()
    await said(process)
    family = psutil.Process().children(recursive=True)
    group = os.getpgid(process.pid)
    given = [member.environ() for member in family if os.getpgid(member.pid) == group]
    await process.stop(grace_s=0)
    assert len(given) == 2
    for environment in given:
        assert environment.pop("ONLY") == "this"
        assert set(environment) <= {"PWD", "LC_CTYPE"}  # of the shell's own, and Python's


async def test_an_interrupt_ends_a_process_in_good_order():
    process = python(
        "import signal, sys, time\n"
        "def bye(*_):\n    print('closing'); sys.exit(0)\n"
        "signal.signal(signal.SIGINT, bye)\n"
        # As one, or the interrupt may come before the line's end.
        "sys.stdout.write('ready\\n')\nsys.stdout.flush()\ntime.sleep(600)"
    )
    await process.start()
    assert await said(process) == "ready"
    await process.stop(grace_s=50)
    assert process.exit_code == 0
    assert process.last_lines == "ready\nclosing"


async def test_a_process_that_will_not_end_is_killed_with_all_it_started():
    process = python(STUBBORN)
    await process.start()
    below = [psutil.Process(int(pid)) for pid in (await said(process)).split()]
    await process.stop(grace_s=0.1)
    assert process.how_it_ended == "was killed by SIGKILL"
    gone, alive = psutil.wait_procs(below, timeout=30)
    assert len(gone) == 2, alive


async def test_a_stop_that_is_cancelled_leaves_nothing():
    process = python(STUBBORN)
    await process.start()
    below = [psutil.Process(int(pid)) for pid in (await said(process)).split()]
    with anyio.move_on_after(0.1):
        await process.stop(grace_s=600)
    assert process.has_ended
    assert len(psutil.wait_procs(below, timeout=30)[0]) == 2


async def test_a_program_that_is_not_there_is_an_error_and_leaves_nothing():
    before = psutil.Process().children()
    process = GuardedProcess("none", ["/nowhere/python"], cwd="/", env={})
    with pytest.raises(FileNotFoundError):
        await process.start()
    await process.stop()
    assert set(psutil.Process().children()) <= set(before)


async def test_a_process_can_be_stopped_before_it_started_and_twice():
    process = python("pass")
    await process.stop()
    await process.stop()


def test_a_reserved_port_is_for_one_server_alone():
    first = ReservedPort("127.0.0.1", None, 20001, 29999)
    with pytest.raises(ServerStartError, match=f"all ports from {first.port} to {first.port} are"):
        ReservedPort("127.0.0.1", None, first.port, first.port)
    with pytest.raises(ServerStartError, match=f"port {first.port} is taken"):
        ReservedPort("127.0.0.1", first.port, 0, 0)
    first.release()
    first.release()
    again = ReservedPort("127.0.0.1", first.port, 0, 0)
    assert again.url == f"http://127.0.0.1:{first.port}"
    again.release()


def test_the_server_it_is_for_can_listen_on_a_reserved_port():
    reserved = ReservedPort("127.0.0.1", None, 20001, 29999)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", reserved.port))
        server.listen()
        socket.create_connection(("127.0.0.1", reserved.port)).close()
    reserved.release()
