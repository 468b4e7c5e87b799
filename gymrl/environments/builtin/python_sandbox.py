"""Run Python that a model wrote, in a process with limits, without a network.

What holds depends on what the machine permits; :attr:`Execution.isolation` says which it was.

``namespaces`` (started as root) and ``user_namespaces`` (where the kernel lets users have them):
    The program has a network namespace with nothing in it, so no address can be reached, not even
    loopback. It has a pid namespace: when it ends, is too slow or is cancelled, the kernel kills
    everything it started. The file system is read-only but for a working directory of bounded size,
    which vanishes; ``/tmp``, ``/var/tmp`` and ``/dev/shm`` are hidden. It has no capabilities.
    As ``namespaces`` it runs under a user id of its own and reads only what everybody may; as
    ``user_namespaces`` it is the calling user, and can *read* that user's files and connect to Unix
    sockets that have a path. Where that user is root (in a container, say) the kernel sets no
    limit on processes; they are then counted every hundredth of a second, threads left out.

``process`` (neither is permitted):
    Limits on time, memory, file size and open files hold, and no process is left behind. Sockets,
    subprocesses, signals to processes and native calls are refused by an audit hook inside the
    interpreter. That stops ordinary code; a program bent on it can get around the hook. What the
    kernel refuses it can't get around: with Landlock (Linux from 5.13 on) writes outside of the
    working directory, from 6.7 on also TCP, from 6.12 on also signals to processes outside. It can
    read what the calling user may, and without Landlock write it. Don't run code of unknown origin
    this way; ``isolation="namespaces"`` refuses to.

None of this is a virtual machine: the program talks to the same kernel.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec

from gymrl.config import Config, require
from gymrl.errors import ConfigError
from gymrl.telemetry import RateLimitedLog

if TYPE_CHECKING:
    from anyio.abc import ByteReceiveStream, Process

logger = logging.getLogger(__name__)
_rate_limited = RateLimitedLog(logger, interval_s=3600.0)

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_INTERPRETER = sorted({sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)})
GRACE_S = 10.0
"""Beyond the program's own time limit, for starting and for cleaning up."""

Isolation = Literal["auto", "namespaces", "process"]


class PythonLimits(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a program may use.

    Attributes:
        wall_time_s: Seconds from start to end.
        cpu_time_s: Seconds of computing, of each process; whole seconds count.
        memory_bytes: Address space of each process.
        file_bytes: Size of each file it writes.
        disk_bytes: All files together; only with namespaces.
        max_processes: Processes and threads at a time, the program itself included.
        max_open_files: Open files of each process.
        output_bytes: Of stdout and of stderr each; more ends the program.
        isolation: ``auto`` takes the best that the machine permits; ``namespaces`` refuses to run
            without; ``process`` does without.
    """

    wall_time_s: float = 10.0
    cpu_time_s: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    max_processes: int = 16
    max_open_files: int = 64
    output_bytes: int = 64 << 10
    isolation: Isolation = "auto"

    def __post_init__(self) -> None:
        for setting in self.__struct_fields__[:-1]:
            value = getattr(self, setting)
            require(value > 0, setting, value, "must be positive")


Outcome = Literal["exited", "timeout", "output_limit", "process_limit", "killed"]


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a program.

    Attributes:
        outcome: ``exited`` by itself (also by a signal: then `signal` says which); ``timeout``;
            ``output_limit``; ``process_limit`` (elsewhere the kernel refuses the process, and the
            program goes on); ``killed`` from outside.
        exit_code: 0 is success; None when it did not exit.
        signal: What ended it, when one did (SIGXCPU: its computing time was spent).
        stdout: What it wrote, up to the limit.
        stderr: The same.
        wall_time_s: From start to end.
        cpu_time_s: Of the program and what it waited for; None when it did not exit.
        max_memory_bytes: Largest resident size; None when it did not exit.
        isolation: What protected the machine: ``namespaces``, ``user_namespaces``, ``process``.
    """

    outcome: Outcome
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    wall_time_s: float = 0.0
    cpu_time_s: float | None = None
    max_memory_bytes: int | None = None
    isolation: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with success."""
        return self.outcome == "exited" and self.exit_code == 0


async def run_python(
    code: str, *, stdin: str = "", limits: PythonLimits | None = None
) -> Execution:
    """Run a program to its end, or to its limits.

    When this returns, or is cancelled, nothing of the program is left: no process, no file.

    Args:
        code: The program's text.
        stdin: What it reads.
        limits: What it may use.

    Raises:
        ConfigError: This machine can't run it with the isolation asked for.
    """
    chosen = limits or PythonLimits()
    directory = await anyio.to_thread.run_sync(tempfile.mkdtemp, None, "gymrl-sandbox-")
    try:
        report, outputs = await _run_in(directory, code, stdin, chosen)
        if "refused" in report and chosen.isolation == "auto":
            # Some machines permit the namespaces and then refuse what is done inside them.
            chosen = msgspec.structs.replace(chosen, isolation="process")
            report, outputs = await _run_in(directory, code, stdin, chosen)
        return _execution(report, outputs, chosen)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(shutil.rmtree, directory, True)


async def _run_in(
    directory: str, code: str, stdin: str, limits: PythonLimits
) -> tuple[dict[str, Any], _Outputs]:
    status_r, status_w = os.pipe()
    try:
        process = await anyio.open_process(
            [sys.executable, "-I", "-S", "-B", str(LAUNCHER), str(status_w)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={},
            start_new_session=True,
            pass_fds=(status_w,),
        )
        os.close(status_w)
        status_w = -1
        job = {
            **limits.to_dict(),
            "code": code,
            "stdin": stdin.encode("utf-8", "replace").decode(),
            "directory": directory,
            "python": sys.executable,
            "keep": _INTERPRETER,
            "environment": {
                "PATH": "/usr/bin:/bin",
                "LANG": "C.UTF-8",
                # Numerical libraries start a thread a core, each with address space of its own.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        }
        outputs = await _converse(process, json.dumps(job).encode(), limits)
        report = json.loads(os.read(status_r, 1 << 16) or b"{}")
    finally:
        os.close(status_r)
        if status_w >= 0:
            os.close(status_w)
    return report, outputs


class _Outputs:
    """Both output streams, bounded."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.texts = {"stdout": b"", "stderr": b""}
        self.overflowed = False

    async def read(self, name: str, stream: ByteReceiveStream, process: Process) -> None:
        """Keep reading to the end, so that the program never waits for us."""
        async for chunk in stream:
            room = self.limit - len(self.texts[name])
            self.texts[name] += chunk[:room]
            if len(chunk) > room and not self.overflowed:
                self.overflowed = True
                await _hang_up(process)


async def _hang_up(process: Process) -> None:
    """Tell the launcher that nobody waits any more; it then ends everything."""
    if process.stdin is not None:
        await process.stdin.aclose()


async def _converse(process: Process, job: bytes, limits: PythonLimits) -> _Outputs:
    outputs = _Outputs(limits.output_bytes)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with anyio.move_on_after(limits.wall_time_s + GRACE_S):
            async with anyio.create_task_group() as group:
                group.start_soon(outputs.read, "stdout", process.stdout, process)
                group.start_soon(outputs.read, "stderr", process.stderr, process)
                # A launcher that ended at once says why in its output.
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await process.stdin.send(struct.pack(">Q", len(job)) + job)
            await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
    return outputs


async def _end(process: Process) -> None:
    """Wait for the launcher's orderly end, bounded; its death ends the program as well."""
    await _hang_up(process)
    with anyio.move_on_after(GRACE_S):
        await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    await process.aclose()


def _execution(report: dict[str, Any], outputs: _Outputs, limits: PythonLimits) -> Execution:
    stdout, stderr = (
        outputs.texts[name].decode("utf-8", "replace") for name in ("stdout", "stderr")
    )
    if "refused" in report:
        raise ConfigError(
            f"isolation={limits.isolation!r}: this machine does not permit it "
            f"({report['refused']}); 'process' does without namespaces, see "
            "gymrl.environments.builtin.python_sandbox for what then holds",
            setting="isolation",
        )
    isolation = report.get("isolation", "")
    if isolation == "process":
        _rate_limited.log(
            "process",
            logging.WARNING,
            "model-written programs run without namespaces here, with limits and an audit hook only",
        )
    outcome = report.get("outcome", "killed")
    if outputs.overflowed:
        outcome = "output_limit"
    return Execution(
        outcome="killed" if outcome == "cancelled" else outcome,
        exit_code=report.get("exit_code"),
        signal=report.get("signal"),
        stdout=stdout,
        stderr=stderr,
        wall_time_s=report.get("wall_time_s", 0.0),
        cpu_time_s=report.get("cpu_time_s"),
        max_memory_bytes=report.get("max_memory_bytes"),
        isolation=isolation,
    )
