"""One file of rollouts, read while it may still be written.

The file is never held open: each read opens it and makes sure that it is still the one that was
indexed. So a file that is replaced, cut or rewritten is noticed, and indexed anew under the next
*epoch*; and nothing is ever written, not even a cache.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio
import msgspec

from gymrl.concurrency import OwnedTasks
from gymrl.errors import ConfigError, FileChangedError
from gymrl.viewer.index import RolloutIndex, Snapshot, take_snapshot
from gymrl.viewer.scan import LineScanner, Scanned

BLOCK_BYTES = 1 << 22
POLL_S = 0.5
_HEAD_BYTES = 4096
_TAIL_BYTES = 256
Identity = tuple[int, int]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the reading has come.

    Attributes:
        epoch: Counts how often the file was begun anew.
        size: Bytes of the file.
        indexed: Bytes up to the last line that is in the index.
        unfinished: Bytes after it, of a line that has no end yet.
        state: ``indexing``, ``following`` (all there is was read), or ``gone``.
        seconds: How long reading what was there first took, or has taken so far.
    """

    epoch: int
    size: int
    indexed: int
    unfinished: int
    state: str
    seconds: float


class _Marks(msgspec.Struct, frozen=True):
    """Bytes by which a file is known again."""

    identity: Identity
    head: bytes
    tail_at: int
    tail: bytes


class RolloutFile:
    """A file of rollouts and its index, which grows as the file does.

    An asynchronous context manager; reading goes on in the background from enter to exit. A reading
    error other than the file being away ends it, and is raised on exit.

    Args:
        path: The file. It may be empty, as long as nothing was written.
        block_bytes: Read at once.
        poll_s: Seconds between two looks at a file that was read to its end.

    Raises:
        ConfigError: On enter: the file can't be read, or its first line is no record.
    """

    def __init__(
        self, path: str | Path, *, block_bytes: int = BLOCK_BYTES, poll_s: float = POLL_S
    ) -> None:
        self.path = Path(path)
        self.index = RolloutIndex()
        self._block_bytes = block_bytes
        self._poll_s = poll_s
        self._scanner = LineScanner()
        self._marks = _Marks((0, 0), b"", 0, b"")
        self._epoch = 0
        self._size = 0
        self._mtime_ns = 0
        self._state = "indexing"
        self._caught_up = False
        self._began = self._ended = time.monotonic()
        self._snapshot: Snapshot | None = None
        self._snapshot_lock = anyio.Lock()
        self._tasks = OwnedTasks(f"reading {self.path.name}")

    async def __aenter__(self) -> RolloutFile:
        try:
            self._begin(await anyio.to_thread.run_sync(self._stat))
            first = await anyio.to_thread.run_sync(self._scan_block)
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}", setting=str(self.path)) from error
        if first.broken and first.broken[0].line == 1:
            raise ConfigError(
                f"{self.path}: the first line is no record of rollouts that can be read: "
                f"{first.broken[0].error}",
                setting=str(self.path),
            )
        self.index.extend(first)
        self._following = self._tasks.start(self._follow(), "follow")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._tasks.close()

    @property
    def epoch(self) -> int:
        """Counts how often the file was begun anew; line numbers hold within one."""
        return self._epoch

    @property
    def progress(self) -> Progress:
        """How far the reading has come."""
        end = time.monotonic() if self._state == "indexing" else self._ended
        return Progress(
            epoch=self._epoch,
            size=self._size,
            indexed=self._scanner.complete,
            unfinished=max(0, self._size - self._scanner.complete),
            state=self._state,
            seconds=end - self._began,
        )

    async def snapshot(self) -> Snapshot:
        """The index of this moment; made once for everyone who asks before it grows."""
        async with self._snapshot_lock:
            epoch, index, held = self._epoch, self.index, self._snapshot
            if held is not None and held.num_rows == index.num_rows:
                return held
            taken = await anyio.to_thread.run_sync(take_snapshot, *index.freeze())
            if epoch == self._epoch:
                self._snapshot = taken
            return taken

    async def read(self, offset: int, size: int, epoch: int | None = None) -> bytes:
        """Bytes of the file, in a thread.

        Raises:
            FileChangedError: The file is not the one that was indexed, or `epoch` is over.
        """
        return await anyio.to_thread.run_sync(self.read_now, offset, size, epoch)

    def read_now(self, offset: int, size: int, epoch: int | None = None) -> bytes:
        """As :meth:`read`, blocking; from any thread."""
        marks = self._marks
        data = b""
        if epoch is None or epoch == self._epoch:
            try:
                with self.path.open("rb", buffering=0) as file:
                    if _identity(os.fstat(file.fileno())) == marks.identity:
                        data = _read_at(file.fileno(), offset, size)
            except OSError as error:
                raise FileChangedError(f"{self.path}: {error.strerror}") from error
        if len(data) != size:
            raise FileChangedError(f"{self.path} has changed; it is being read anew")
        return data

    async def _follow(self) -> None:
        while True:
            try:
                found, known = await anyio.to_thread.run_sync(self._look)
                if not known:
                    self._begin(found)
                self._size, self._mtime_ns = found.st_size, found.st_mtime_ns
                if found.st_size > self._scanner.read_to:
                    self._caught_up = False
                    self.index.extend(await anyio.to_thread.run_sync(self._scan_block))
                    continue
                self._caught_up = True
                if self._state != "following":
                    self._state, self._ended = "following", time.monotonic()
            except OSError:
                # Deleted, or out of reach: what is known stays, and it may come back.
                self._state = "gone"
            await anyio.sleep(self._poll_s)

    def _begin(self, found: os.stat_result) -> None:
        """Start from the first byte."""
        self._epoch += 1
        self.index = RolloutIndex()
        self._snapshot = None
        self._scanner = LineScanner()
        self._marks = _Marks(_identity(found), b"", 0, b"")
        self._size, self._mtime_ns = found.st_size, found.st_mtime_ns
        self._state, self._began = "indexing", time.monotonic()
        self._caught_up = False

    def _stat(self) -> os.stat_result:
        """Of the file, as one who may read it sees it."""
        with self.path.open("rb", buffering=0) as file:
            return os.fstat(file.fileno())

    def _look(self) -> tuple[os.stat_result, bool]:
        """The file as it is now, and whether it still begins with what was indexed."""
        with self.path.open("rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            known = (
                self._state != "gone"
                and _identity(found) == self._marks.identity
                and found.st_size >= self._scanner.complete
            )
            touched = (found.st_size, found.st_mtime_ns) != (self._size, self._mtime_ns)
            if known and touched:
                known = self._knows(file.fileno())
        if touched and self._caught_up:
            # A half line at the end may have been cut off and written again.
            self._scanner.drop_pending()
        elif found.st_size < self._scanner.read_to:
            self._scanner.drop_pending()
        return found, known

    def _knows(self, descriptor: int) -> bool:
        """Whether head and tail of what was indexed are still there."""
        marks = self._marks
        return (
            _read_at(descriptor, 0, len(marks.head)) == marks.head
            and _read_at(descriptor, marks.tail_at, len(marks.tail)) == marks.tail
        )

    def _scan_block(self) -> Scanned:
        with self.path.open("rb", buffering=0) as file:
            descriptor = file.fileno()
            if _identity(os.fstat(descriptor)) != self._marks.identity:
                return Scanned()
            block = _read_at(descriptor, self._scanner.read_to, self._block_bytes)
            scanned = self._scanner.scan(block)
            complete = self._scanner.complete
            tail_at = max(0, complete - _TAIL_BYTES)
            self._marks = _Marks(
                self._marks.identity,
                _read_at(descriptor, 0, min(_HEAD_BYTES, complete)),
                tail_at,
                _read_at(descriptor, tail_at, complete - tail_at),
            )
        return scanned


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Up to `size` bytes; fewer only where the file ends."""
    parts = []
    while size > 0:
        part = os.pread(descriptor, size, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
