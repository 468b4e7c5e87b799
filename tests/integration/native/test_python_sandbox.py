"""Model-written Python in real processes: every limit is reached, and nothing is left behind."""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import psutil
import pytest

from gymrl.concurrency import gather_bounded
from gymrl.environments.builtin.python_sandbox import (
    LAUNCHER,
    Execution,
    PythonLimits,
    run_python,
)
from gymrl.errors import ConfigError
from tests.integration.actors.watching import all_end, until

# As good as this machine permits, and as little as any machine permits.
ISOLATIONS = pytest.mark.parametrize("isolation", ["auto", "process"])


async def execute(code, isolation="auto", *, stdin="", wall_time_s=30.0, **limits):
    limits["wall_time_s"] = wall_time_s
    return await run_python(code, stdin=stdin, limits=PythonLimits(isolation=isolation, **limits))


def left_over():
    """Processes of this test's sandboxes; launchers that this process has started among them."""
    processes = [process for process in psutil.process_iter() if working_in(SCRATCH, process)]
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if str(LAUNCHER) in child.cmdline():
                processes.append(child)
    return processes


def working_in(directory, process):
    with contextlib.suppress(psutil.Error):
        return process.cwd().startswith(f"{directory}/")
    return False


SCRATCH = Path(tempfile.gettempdir()) / f"gymrl-tests-{os.getpid()}"
"""Where the sandboxes of these tests are: others may run beside them."""


@pytest.fixture(autouse=True)
def nothing_is_left_over(tmp_path_factory):
    tmp_path_factory.getbasetemp()  # stays where it is
    SCRATCH.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(SCRATCH)
    yield
    tempfile.tempdir = before
    assert left_over() == []
    SCRATCH.rmdir()


@ISOLATIONS
async def test_a_program_reads_writes_and_ends(isolation):
    run = await execute(
        "import sys; print(sum(map(int, input().split()))); print('é', file=sys.stderr)",
        isolation,
        stdin="1 2 3",
    )

    assert run.ok
    assert (run.outcome, run.exit_code, run.signal) == ("exited", 0, None)
    assert (run.stdout, run.stderr) == ("6\n", "é\n")
    assert run.isolation
    assert run.max_memory_bytes > 0


@ISOLATIONS
async def test_an_error_is_an_exit_code_and_a_traceback(isolation):
    run = await execute("import sys\nprint('before')\n1 / 0", isolation)

    assert not run.ok
    assert run.exit_code == 1
    assert run.stdout == "before\n"
    assert "ZeroDivisionError" in run.stderr
    assert (await execute("raise SystemExit(7)", isolation)).exit_code == 7


@ISOLATIONS
async def test_a_program_that_sleeps_too_long_is_stopped(isolation):
    run = await execute(
        "import time; print(1, flush=True); time.sleep(60)", isolation, wall_time_s=2
    )

    assert run.outcome == "timeout"
    assert run.stdout == "1\n"
    assert run.wall_time_s < 30


@ISOLATIONS
async def test_a_program_that_ignores_signals_is_stopped_all_the_same(isolation):
    code = (
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)"
    )

    assert (await execute(code, isolation, wall_time_s=0.5)).outcome == "timeout"


@ISOLATIONS
async def test_computing_time_is_limited(isolation):
    run = await execute("while True: pass", isolation, cpu_time_s=1, wall_time_s=45)

    assert run.outcome == "exited"
    assert run.signal is not None


@ISOLATIONS
async def test_memory_is_limited(isolation):
    run = await execute("x = bytearray(2 << 30)", isolation, memory_bytes=512 << 20)

    assert run.exit_code == 1
    assert "MemoryError" in run.stderr


@ISOLATIONS
async def test_the_size_of_a_file_is_limited(isolation):
    code = (
        "import os\n"
        "try:\n"
        "    with open('big', 'wb', buffering=0) as f:\n"
        "        while True: f.write(b'x' * 65536)\n"
        "except OSError as error:\n"
        "    print(error.strerror, os.path.getsize('big'))\n"
    )

    run = await execute(code, isolation, file_bytes=1 << 20)

    assert run.stdout == f"File too large {1 << 20}\n"


@ISOLATIONS
async def test_output_is_limited(isolation):
    run = await execute("while True: print('x' * 1000)", isolation, output_bytes=10_000)

    assert run.outcome == "output_limit"
    assert len(run.stdout) == 10_000


@ISOLATIONS
async def test_processes_are_limited_and_none_is_left_behind(isolation):
    code = (
        "import os, time\n"
        "made = 0\n"
        "try:\n"
        "    while made < 1000:\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n"
        "            time.sleep(60)\n"
        "        made += 1\n"
        "except OSError:\n"
        "    print(made)\n"
    )

    run = await execute(code, isolation, max_processes=5)

    if run.outcome != "process_limit":
        assert int(run.stdout) <= 5


@ISOLATIONS
async def test_a_process_that_was_left_running_ends_with_the_program(isolation):
    code = (
        "import os, time\n"
        "try:\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "        os._exit(0)\n"
        "except PermissionError: pass\n"
        "print('done')\n"
    )

    run = await execute(code, isolation)

    assert run.ok


@pytest.fixture
def listener():
    """A socket on loopback that would take connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def port_of(server):
    return server.getsockname()[1]


def assert_nobody_came(server):
    with pytest.raises(BlockingIOError):
        server.accept()


@ISOLATIONS
@pytest.mark.parametrize(
    "call",
    [
        "socket.create_connection(('127.0.0.1', {port}), timeout=5)",
        "socket.socket().connect(('127.0.0.1', {port}))",
        "socket.getaddrinfo('example.org', 80)",
        "socket.create_connection(('192.0.2.1', 80), timeout=5)",
    ],
)
async def test_the_network_is_refused(isolation, call, listener):
    port = port_of(listener)
    code = (
        "import socket\n"
        f"try:\n    {call.format(port=port)}\n    print('connected')\n"
        "except OSError as error:\n    print('refused', type(error).__name__)\n"
    )

    run = await execute(code, isolation)

    assert run.stdout.startswith("refused"), run
    assert_nobody_came(listener)


async def test_native_code_reaches_no_network_where_namespaces_are_permitted(listener):
    port = port_of(listener)
    code = (
        "import ctypes, socket, struct\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "fd = libc.socket(2, 1, 0)\n"
        f"address = struct.pack('=HHI', 2, socket.htons({port}), socket.htonl(0x7f000001)) + bytes(8)\n"
        "print(libc.connect(fd, address, len(address)))\n"
    )

    run = await execute(code)

    if run.isolation == "process":
        assert not run.ok
    else:
        assert run.stdout == "-1\n"
    assert_nobody_came(listener)


@ISOLATIONS
async def test_nothing_of_the_callers_environment_or_input_is_seen(isolation):
    os.environ["GYMRL_TEST_SECRET"] = "hidden"
    try:
        run = await execute(
            "import os, sys; print(sorted(os.environ)); print(sys.stdin.read() == '')", isolation
        )
    finally:
        del os.environ["GYMRL_TEST_SECRET"]

    assert "GYMRL_TEST_SECRET" not in run.stdout
    assert run.stdout.endswith("True\n")


async def test_files_outside_cannot_be_written_where_namespaces_are_permitted(tmp_path):
    target = tmp_path / "outside"
    run = await execute(f"open({str(target)!r}, 'w').write('x')")

    if run.isolation != "process":
        assert not run.ok
        assert not target.exists()


async def test_a_program_without_namespaces_writes_only_where_the_kernel_lets_it(tmp_path):
    target = tmp_path / "outside"
    run = await execute(
        "open('mine', 'w').write('x'); open('mine', 'a').write('y'); print(open('mine').read())\n"
        "open('/dev/null', 'w').write('x')\n"
        f"open({str(target)!r}, 'w').write('x')",
        "process",
    )

    assert run.stdout == "xy\n", run
    assert target.exists() != landlock_is_there()
    assert run.ok != landlock_is_there()


def landlock_is_there() -> bool:
    """Whether this machine's kernel can refuse writes of a process that has no namespaces."""
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1)) >= 1


@ISOLATIONS
async def test_a_program_signals_no_process_of_the_callers(isolation):
    """``os.kill(-1, 9)`` in a program without namespaces would end all that its user runs."""
    bystander = await anyio.open_process([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run = await execute(
            f"import os, signal, sys\npid = {bystander.pid}\n"
            "ways = [lambda: os.kill(pid, 9), lambda: os.killpg(os.getpgid(pid), 9),\n"
            "        lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9),\n"
            "        lambda: sys.modules['_signal'].pidfd_send_signal(os.pidfd_open(pid), 9)]\n"
            "for way in ways:\n"
            "    try:\n        way()\n        print('killed')\n"
            "    except (OSError, AttributeError):\n        print('refused')\n",
            isolation,
        )
        assert run.stdout == "refused\n" * 4, run
        assert bystander.returncode is None
    finally:
        bystander.kill()
        await bystander.aclose()


async def test_many_programs_run_at_a_time_and_share_nothing():
    async def one(number):
        return await execute(
            f"import os; open('mine', 'w').write('{number}'); print(sorted(os.listdir()))"
        )

    runs = await gather_bounded(one, range(8), 4)

    assert {run.stdout for run in runs} == {"['main.py', 'mine']\n"}


@ISOLATIONS
async def test_cancelling_ends_the_program_before_it_returns(isolation):
    with anyio.move_on_after(0.5) as scope:
        await execute("import time; time.sleep(60)", isolation, wall_time_s=50)

    assert scope.cancelled_caught
    assert left_over() == []


async def test_a_program_ends_when_whoever_asked_is_killed():
    code = (
        "import anyio\n"
        "from gymrl.environments.builtin.python_sandbox import run_python\n"
        "anyio.run(run_python, 'import time\\nprint(1)\\ntime.sleep(60)')\n"
    )
    asker = await anyio.open_process(
        [sys.executable, "-c", code],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(SCRATCH)},
    )
    await until(lambda: any(working_in(SCRATCH, p) for p in left_over()))
    family = psutil.Process(asker.pid).children(recursive=True)
    asker.kill()
    await asker.wait()

    assert await all_end(process.pid for process in family)
    assert left_over() == []
    for directory in SCRATCH.iterdir():  # a killed process cleans nothing up
        (directory / "main.py").unlink(missing_ok=True)
        directory.rmdir()


DROPPED = """
import ctypes, sys, anyio, msgspec
CAP_SYS_ADMIN, PR_CAPBSET_DROP = 21, 24
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)
import os
os.execv(sys.executable, [sys.executable, "-c", '''
import sys, anyio, msgspec
from gymrl.environments.builtin.python_sandbox import run_python
for code in sys.argv[1:]:
    print(msgspec.json.encode(anyio.run(run_python, code)).decode())
''', *sys.argv[1:]])
"""


async def test_without_the_right_to_make_namespaces_users_have_their_own_or_a_hook_stands_in():
    """In containers root often lacks CAP_SYS_ADMIN; this is such a one."""
    programs = [
        "import socket\nsocket.socket().connect(('127.0.0.1', 9))",
        "open('/etc/gymrl-was-here', 'w')",
        "import os\nwhile True:\n  if os.fork() == 0:\n    import time; time.sleep(60)",
        "print(1)",
    ]
    done = await anyio.run_process([sys.executable, "-c", DROPPED, *programs])
    runs = [Execution(**fields) for fields in map(_decoded, done.stdout.splitlines())]

    assert {run.isolation for run in runs} <= {"user_namespaces", "process", "namespaces"}
    connect, write, fork, plain = runs
    assert plain.stdout == "1\n"
    assert not connect.ok
    assert not fork.ok
    if write.isolation != "process":
        assert not write.ok
    assert not await anyio.Path("/etc/gymrl-was-here").exists()


def _decoded(line):
    import msgspec

    return msgspec.json.decode(line)


async def test_text_that_utf8_cannot_hold_and_zero_bytes_hurt_nobody():
    run = await execute("print(len(input()))", stdin="\ud800")
    assert run.stdout == "1\n"

    run = await execute("print('a\ud800')")
    assert run.outcome == "exited"

    run = await execute("print(1)\0")
    assert not run.ok


async def test_limits_are_checked_when_they_are_made():
    with pytest.raises(ConfigError, match="memory_bytes=0"):
        PythonLimits(memory_bytes=0)
