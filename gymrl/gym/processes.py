"""Processes of a worker that end with it: started, heard, watched, stopped.

Each has a process group of its own, led by a *guard*: a small shell that reads a pipe whose only
write end this process holds. End-of-file means that this process is gone, however it went, and the
guard kills its group, itself included. Since the guard leads the group and is waited for last, the
group's number can't come to mean another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, BinaryIO

import anyio

from gymrl.actors.lifeline import descendants
from gymrl.actors.output import ChildOutput
from gymrl.concurrency import OwnedTasks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

KEPT_LINES = 40
LINES_PER_S = 200
SIGINT_GRACE_S = 2.5
"""Gym's servers give requests half a second and then close; what takes longer is killed."""

_DRAIN_S = 1.0
_GUARD = "read _; kill -KILL 0"


class GuardedProcess:
    """One process that does not outlive this one.

    Args:
        name: Every line it writes is logged with this.
        command: Program and arguments.
        cwd: Its working directory.
        env: Its environment, complete.
        on_exit: Called in the event loop once it is gone, also when it was told to go.
        log_file: Gets everything it writes, behind what is there; folders are made.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        on_exit: Callable[[], None] | None = None,
        log_file: str | None = None,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._cwd = cwd
        self._env = dict(env)
        self._on_exit = on_exit
        self._log_file = log_file
        self._ended = anyio.Event()
        self._tasks = OwnedTasks(name)
        self._undo = contextlib.ExitStack()
        self._output: ChildOutput | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, once it was started."""
        return self._popen.pid if self._popen is not None else None

    @property
    def has_ended(self) -> bool:
        """Whether it was started and is gone."""
        return self._popen is not None and self._popen.returncode is not None

    @property
    def exit_code(self) -> int | None:
        """Its exit code; negative: the signal that ended it. None while it runs."""
        return self._popen.returncode if self._popen is not None else None

    @property
    def how_it_ended(self) -> str:
        """For errors: exit code or signal."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    @property
    def last_lines(self) -> str:
        """What it wrote last to stdout and stderr."""
        return self._output.last_lines if self._output is not None else ""

    async def start(self) -> None:
        """Start it; does not wait for anything.

        Raises:
            OSError: The program or the directory is not there, or no process could be made.
        """
        copy = _opened(self._log_file)
        death_read, death_write = os.pipe()
        self._undo.callback(os.close, death_write)
        output_read, output_write = os.pipe()
        self._output = ChildOutput(self.name, output_read, KEPT_LINES, LINES_PER_S, copy)
        self._undo.callback(self._output.close)
        try:
            self._guard = subprocess.Popen(  # noqa: ASYNC220 - a vfork; it waits for nothing
                ["/bin/sh", "-c", _GUARD],
                stdin=death_read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._env,  # what is kept from the process is kept from its guard
                process_group=0,
            )
            self._popen = subprocess.Popen(  # noqa: ASYNC220
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                cwd=self._cwd,
                env=self._env,
                process_group=self._guard.pid,
            )
        except OSError:
            self._release()
            raise
        finally:
            os.close(death_read)
            os.close(output_write)
        _ = self._tasks.start(self._output.follow(), "output")
        _ = self._tasks.start(self._watch(self._popen), "watch")

    async def _watch(self, popen: subprocess.Popen[bytes]) -> None:
        try:
            descriptor = os.pidfd_open(popen.pid)
            try:
                await anyio.wait_readable(descriptor)
            finally:
                os.close(descriptor)
            self._end_group()
        finally:
            if popen.poll() is not None:
                if self._output is not None:
                    self._output.drain()
                self._ended.set()
                if self._on_exit is not None:
                    self._on_exit()

    async def wait(self) -> None:
        """Wait until it is gone and what it wrote was read."""
        await self._ended.wait()

    async def stop(self, grace_s: float = SIGINT_GRACE_S) -> None:
        """Interrupt it, give it `grace_s` seconds, then kill its group. Safe to call twice.

        Nothing of it is left afterwards, also when this is cancelled.
        """
        try:
            if self._popen is not None and not self.has_ended and grace_s > 0:
                self._popen.send_signal(signal.SIGINT)
                with anyio.move_on_after(grace_s):
                    await self._ended.wait()
        finally:
            self._end_group()
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(_DRAIN_S):
                    if self._popen is not None and self._tasks:
                        await self._ended.wait()
                await self._tasks.close()
            self._release()

    def _end_group(self) -> None:
        """Kill what is in the group, and what the process started outside it."""
        popen, guard = self._popen, self._guard
        if popen is not None and popen.returncode is None:
            for pid in descendants(popen.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if guard is not None and guard.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(guard.pid, signal.SIGKILL)
        for killed in (popen, guard):
            if killed is not None:
                killed.wait()

    def _release(self) -> None:
        self._end_group()
        self._undo.close()


def _opened(log_file: str | None) -> BinaryIO | None:
    if log_file is None:
        return None
    os.makedirs(os.path.dirname(log_file), exist_ok=True)
    return open(log_file, "ab", buffering=0)
