"""What a child writes to its stdout and stderr: to the driver's log, and the last lines kept."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import logging
import os
import time
from typing import BinaryIO

import anyio

logger = logging.getLogger(__name__)

_CHUNK = 64 << 10
_LINE_LIMIT = 2000
_PIPE_BYTES = 1 << 20


class ChildOutput:
    """Reads a child's output without blocking it, and without keeping more than a few lines.

    Args:
        name: The actor's name: every logged line begins with it.
        descriptor: Read end of the pipe; closed by :meth:`close`.
        keep: Last lines to keep.
        lines_per_s: More lines than this are counted, not logged.
        copy: Gets every byte; closed by :meth:`close`.
    """

    def __init__(
        self,
        name: str,
        descriptor: int,
        keep: int,
        lines_per_s: int,
        copy: BinaryIO | None = None,
    ) -> None:
        self._name = name
        self._descriptor = descriptor
        self._copy = copy
        self._lines: collections.deque[str] = collections.deque(maxlen=keep)
        self._partial = b""
        self._lines_per_s = lines_per_s
        self._second = 0.0
        self._logged = 0
        self._left_out = 0
        self._closed = False
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # a limit of the system; the pipe is then smaller
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    @property
    def last_lines(self) -> str:
        """The last lines, oldest first."""
        partial = [self._text(self._partial)] if self._partial else []
        return "\n".join([*self._lines, *partial])

    async def follow(self) -> None:
        """Read until the child and all who share its pipe have closed it."""
        while not self._closed:
            await anyio.wait_readable(self._descriptor)
            if self._read_once() == 0:
                return

    def drain(self) -> None:
        """Take what is there now."""
        if self._closed:
            return
        for _ in range(2 * _PIPE_BYTES // _CHUNK):
            if self._read_once() <= 0:
                break
        if self._left_out:
            logger.info("[%s] ... %d lines left out", self._name, self._left_out)
            self._left_out = 0

    def _read_once(self) -> int:
        """Bytes read; 0 at the end, -1 when there is nothing now."""
        try:
            chunk = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return -1
        if not chunk:
            return 0
        if self._copy is not None:
            try:
                self._copy.write(chunk)
            except OSError as error:
                logger.warning("[%s] its log file ends here: %s", self._name, error)
                self._copy.close()
                self._copy = None
        lines = (self._partial + chunk).split(b"\n")
        self._partial = lines.pop()[-_LINE_LIMIT:]
        now = time.monotonic()
        if now - self._second >= 1:
            if self._left_out:
                logger.info("[%s] ... %d lines left out", self._name, self._left_out)
            self._second, self._logged, self._left_out = now, 0, 0
        room = max(0, self._lines_per_s - self._logged)
        kept = self._lines.maxlen or 0
        for index, line in enumerate(lines):
            if index >= room and index < len(lines) - kept:
                continue
            text = self._text(line)
            self._lines.append(text)
            if index < room:
                logger.info("[%s] %s", self._name, text)
        self._logged += min(room, len(lines))
        self._left_out += max(0, len(lines) - room)
        return len(chunk)

    @staticmethod
    def _text(line: bytes) -> str:
        text = line[:_LINE_LIMIT].decode("utf-8", "replace").rstrip("\r")
        return text if len(line) <= _LINE_LIMIT else f"{text}..."

    def close(self) -> None:
        """Take what is left and close the pipe. Safe to call twice."""
        if self._closed:
            return
        self.drain()
        self._closed = True
        os.close(self._descriptor)
        if self._copy is not None:
            self._copy.close()
