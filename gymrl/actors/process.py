"""One child process: started, watched and ended, with everything it started."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.actors.lifeline import MARK, end_marked
from gymrl.actors.lifeline import __file__ as _LIFELINE
from gymrl.actors.messages import PROTOCOL_VERSION
from gymrl.actors.output import ChildOutput
from gymrl.errors import ActorStartError

if TYPE_CHECKING:
    from gymrl.actors.options import SpawnOptions

logger = logging.getLogger(__name__)


class ChildProcess:
    """A worker process, in a session and process group of its own.

    Nothing of the driver is inherited but three descriptors: the link, the lane for shared
    segments, and the death pipe. The process is started by executing the interpreter anew, so
    neither threads nor locks nor the user's ``__main__`` come along.

    Args:
        name: The actor's name.
        options: Its settings.

    Attributes:
        link: The driver's end of the link; the channel takes it over.
        lane: The driver's end of the lane; the channel takes it over.
        has_closed: Set when it has said that it is ending in good order.

    Raises:
        ActorStartError: The process could not be started.
    """

    def __init__(self, name: str, options: SpawnOptions) -> None:
        self.name = name
        self.has_closed = False
        self._mark = secrets.token_hex(16)
        try:
            self._start(name, options)
        except (OSError, ValueError) as error:
            raise ActorStartError(
                f"{name}: a worker process did not start: {error}", actor=name
            ) from error
        self.pid = self._popen.pid
        self._ended = anyio.Event()
        self._released = False

    def _start(self, name: str, options: SpawnOptions) -> None:
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as passed:
            self.link, child_link = socket.socketpair()
            passed.callback(child_link.close)
            undo.callback(self.link.close)
            self.lane, child_lane = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            passed.callback(child_lane.close)
            undo.callback(self.lane.close)
            death_read, self._death = os.pipe()
            passed.callback(os.close, death_read)
            undo.callback(os.close, self._death)
            output_read, output_write = os.pipe()
            passed.callback(os.close, output_write)
            self.output = ChildOutput(
                name, output_read, options.stderr_lines, options.output_lines_per_s
            )
            undo.callback(self.output.close)
            descriptors = (child_link.fileno(), child_lane.fileno(), death_read)
            self._popen = subprocess.Popen(
                _command(name, options, descriptors),
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                pass_fds=descriptors,
                start_new_session=True,
                env={**os.environ, **options.env, MARK: self._mark},
            )
            undo.pop_all()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone and was waited for."""
        return self._popen.returncode is not None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, when it ended by itself."""
        code = self._popen.returncode
        return code if code is not None and code >= 0 else None

    @property
    def signal(self) -> int | None:
        """The signal that ended it."""
        code = self._popen.returncode
        return -code if code is not None and code < 0 else None

    @property
    def how_it_ended(self) -> str:
        """For errors: exit code or signal."""
        if self.signal is not None:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(self.signal).name}"
            return f"was killed by signal {self.signal}"
        return f"ended with exit code {self.exit_code}"

    async def watch(self) -> None:
        """Wait for the process to end, and end what it left behind.

        Cancelling this (the event loop is shutting down) kills the process.
        """
        try:
            await self._wait_for_exit()
        finally:
            self._reap()
            self._ended.set()

    async def _wait_for_exit(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            # Kernels without process descriptors: look now and then.
            while self._is_running():  # noqa: ASYNC110  # there is no event to wait for
                await anyio.sleep(0.02)
            return
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)

    def _is_running(self) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.pid, flags) is None
        except ChildProcessError:
            return False  # someone else in this process has waited for it

    def _reap(self) -> None:
        # While the leader is not waited for, its id cannot name another process or group.
        self.kill()
        if self._popen.wait() != 0 or not self.has_closed:
            # It did not see its own end, so what left its group is still there.
            end_marked(self._mark)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until :meth:`watch` has seen the end; returns whether it did in time."""
        with anyio.move_on_after(seconds):
            await self._ended.wait()
        return self._ended.is_set()

    def kill(self) -> None:
        """Kill the process and its group, unless it was waited for already."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Kill what still runs, wait for it, and close the descriptors. Safe to call twice."""
        if self._released:
            return
        self._released = True
        if not self.has_ended:
            self._reap()
        os.close(self._death)
        self.output.close()

    def __del__(self) -> None:
        if not hasattr(self, "_released") or self._released:
            return
        warnings.warn(
            f"actor {self.name} was not closed", ResourceWarning, stacklevel=2, source=self
        )
        self.release()


def _command(name: str, options: SpawnOptions, descriptors: tuple[int, int, int]) -> list[str]:
    link, lane, death = descriptors
    plan: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "driver": os.getpid(),
        "link": link,
        "lane": lane,
        "death": death,
        "name": name,
        "path": [os.path.abspath(entry) for entry in sys.path],
        "log_level": logging.getLogger().getEffectiveLevel(),
        "options": msgspec.to_builtins(msgspec.structs.replace(options, env={})),
    }
    if not sys.executable:
        raise ActorStartError(f"{name}: sys.executable is not set; no worker can be started")
    # Unbuffered, so that the last lines before a death are there to be read.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return [sys.executable, *flags, "-u", os.path.abspath(_LIFELINE), json.dumps(plan)]
