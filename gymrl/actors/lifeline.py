"""First code of a worker process: sees to it that nothing outlives the driver.

Run as a script, before anything else is imported, and with the standard library alone. The worker
leads a session and process group of its own. It holds the read end of the *death pipe*, whose only
write end the driver has: end-of-file means the driver is gone, however it went. Then the worker has
a second to close, and its process group is killed, with whatever else descends from it.

Two watch the pipe: a thread, which can close in good order, and a small shell in the same group,
which needs neither the interpreter nor its lock and so also ends a worker that is stuck in C code.

What a worker starts may leave its group and its descent (a daemon does both). It still has the mark
that the driver put into the worker's environment, and is found by it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "GYMRL_WORKER"
GRACE_S = 1.0
_POLL_MS = 500
_PASSES = 5
_GUARDIAN = "read _; sleep 2; kill -KILL 0"


class Lifeline:
    """Watches over the driver from inside a worker.

    Args:
        death_fd: Read end of the death pipe.
        driver_pid: The driver's process id; watched beside the pipe, whose write end a fork of
            the driver might keep open.
    """

    def __init__(self, death_fd: int, driver_pid: int) -> None:
        self._death_fd = death_fd
        self._driver_pid = driver_pid
        self._guardian: int | None = None
        self._lock = threading.Lock()
        self._on_gone: Callable[[], object] | None = None
        self.driver_is_gone = False

    def start(self) -> None:
        """Start both watchers."""
        with contextlib.suppress(OSError):  # no shell on this machine: the thread alone must do
            self._guardian = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", _GUARDIAN],
                {"PATH": "/usr/bin:/bin"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, self._death_fd, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
            )
        threading.Thread(target=self._watch, name="gymrl-lifeline", daemon=True).start()

    def when_gone(self, callback: Callable[[], object]) -> None:
        """Have `callback` called, in the watching thread, when the driver is gone (or is now)."""
        with self._lock:
            self._on_gone = callback
            gone = self.driver_is_gone
        if gone:
            callback()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._death_fd, select.POLLIN | select.POLLHUP)
        while not poll.poll(_POLL_MS) and os.getppid() == self._driver_pid:
            pass
        with self._lock:
            self.driver_is_gone = True
            callback = self._on_gone
        if callback is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the end is near anyway
                callback()
        time.sleep(GRACE_S)
        end_everything()

    def finish(self) -> None:
        """End the guardian and all descendants, before an orderly exit."""
        if self._guardian is not None:
            with contextlib.suppress(OSError):
                os.kill(self._guardian, signal.SIGKILL)
                os.waitpid(self._guardian, 0)
            self._guardian = None
        if self.driver_is_gone:
            end_everything()
        end_descendants()


def end_everything() -> None:
    """Kill the descendants of this process and its own process group, this process included."""
    end_descendants()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def end_descendants() -> None:
    """Kill what this process started, also where it made a session or a daemon of it."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    mark = os.environ.get(MARK)
    if mark:
        end_marked(mark)


def end_marked(mark: str) -> None:
    """Kill every other process whose environment has a worker's mark.

    The mark is random, so no process carries it by chance; each is held by a descriptor before it
    is looked at, so its number cannot come to mean another.
    """
    wanted = f"{MARK}={mark}".encode()
    for _ in range(_PASSES):  # again, for what was forked meanwhile
        found = False
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):  # another user's, or gone
                    found |= _end_if_marked(int(entry), wanted)
        if not found:
            return


def _end_if_marked(pid: int, wanted: bytes) -> bool:
    descriptor = os.pidfd_open(pid)
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if wanted not in file.read().split(b"\0"):
                return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    finally:
        os.close(descriptor)


def descendants(root: int) -> list[int]:
    """Process ids below `root`, read from ``/proc``; children before their own children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The name in parentheses may hold anything; the parent's id follows the state.
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def main() -> None:
    """Start watching, then become the worker."""
    plan = json.loads(sys.argv[1])
    for descriptor in (plan["link"], plan["lane"], plan["death"]):
        os.set_inheritable(descriptor, False)
    lifeline = Lifeline(plan["death"], plan["driver"])
    lifeline.start()
    sys.path[:] = plan["path"]
    sys.argv[:] = [plan["name"]]
    importlib.import_module("gymrl.actors.child").main(plan, lifeline)


if __name__ == "__main__":
    main()
