"""Telling a process that computes from one that is stopped, or waits for something."""

from __future__ import annotations

import contextlib
import os
import time

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Of one processor. What idle threads use, looking around now and then, stays far below.
_BUSY_SHARE = 0.05


class ProcessActivity:
    """What the kernel says of a process, read from ``/proc``.

    Args:
        pid: The process. It must not have been waited for while this is used.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since = time.monotonic()
        self._used_s = self._processor_s()

    def is_computing(self) -> bool:
        """Whether the process used the processor since it was last asked about, or wants to now.

        A thread that waits for a processor or for the disk counts: on a busy machine that is what
        a computation does most of the time. A stopped process does neither. False where the system
        does not say.
        """
        now, used_s = time.monotonic(), self._processor_s()
        passed_s, used_since_s = now - self._since, used_s - self._used_s
        self._since, self._used_s = now, used_s
        return used_since_s > passed_s * _BUSY_SHARE or self._has_thread_at_work()

    def _processor_s(self) -> float:
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = _stat_fields(f"/proc/{self._pid}/stat")
            return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime and stime
        return 0.0

    def _has_thread_at_work(self) -> bool:
        with contextlib.suppress(OSError):  # it is gone
            for thread in os.listdir(f"/proc/{self._pid}/task"):
                with contextlib.suppress(OSError, IndexError):  # the thread is gone
                    if _stat_fields(f"/proc/{self._pid}/task/{thread}/stat")[0] in (b"R", b"D"):
                        return True
        return False


def _stat_fields(path: str) -> list[bytes]:
    """The fields of a ``stat`` file from the state on; the name before may hold anything."""
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()
