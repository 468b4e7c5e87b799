"""The file of an evaluation's rows: one line a row, written as it ends, whole at any moment.

One process writes a directory at a time; it holds a lock that ends with it, however it ends. What a
kill leaves is at most half a last line, which the next writer cuts off. A row is finished once a
line has its trajectory; a line with a failure is one try.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from typing import TYPE_CHECKING, Self

import msgspec

from gymrl.errors import ConfigError, OutputError
from gymrl.evaluation.differences import is_extension, plan_differences
from gymrl.evaluation.lines import counting_lines, run_record
from gymrl.evaluation.plan import EvaluationPlan, PlannedTask, TaskKey
from gymrl.records.media import MediaFolder
from gymrl.records.reader import cut_torn_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    from gymrl.records.schema import RowRecord, RunRecord
    from gymrl.types import RolloutGroup

logger = logging.getLogger(__name__)

PLAN_FILE = "plan.json"
ROLLOUTS_FILE = "rollouts.jsonl"
METRICS_FILE = "benchmark_metrics.json"
LOCK_FILE = ".lock"

_encoder = msgspec.json.Encoder()


class PendingRow(msgspec.Struct, frozen=True):
    """A row that has no result yet.

    Attributes:
        task: What is attempted.
        repeat: Which attempt at it.
        tries: How often it has failed, by the file.
    """

    task: PlannedTask
    repeat: int
    tries: int


class Journal:
    """An evaluation's directory, open for writing between :meth:`open` and :meth:`close`.

    Args:
        directory: Made where it is missing.
        plan: What is evaluated.
        overwrite: Throw away what the directory holds of a former evaluation.
        extend: Let the plan have more than the directory's: tasks, repeats, benchmarks.
    """

    def __init__(
        self,
        directory: Path,
        plan: EvaluationPlan,
        *,
        overwrite: bool = False,
        extend: bool = False,
    ) -> None:
        self.directory = directory
        self.plan = plan
        self.path = directory / ROLLOUTS_FILE
        self._media = MediaFolder(self.path)
        self._overwrite = overwrite
        self._extend = extend
        self._known = {task.key: task for task in plan.tasks()}
        self._tries: dict[tuple[TaskKey, int], int] = {}
        self._finished: set[tuple[TaskKey, int]] = set()
        self._file: int | None = None
        self._lock: int | None = None

    def open(self) -> None:
        """Take the directory, check what it holds, and make its file ready to be continued.

        Blocks for as long as it takes to read the file.

        Raises:
            ConfigError: Another process writes there (it is named), the directory is another
                evaluation's (the differences are named), or it cannot be made.
            RowValueError: A line before the last is no record; names file and line.
            OutputError: The file cannot be written.
        """
        self._lock = _lock(self.directory)
        try:
            self._open(overwrite=self._overwrite, extend=self._extend)
        except BaseException:
            self.close()
            raise

    def _open(self, *, overwrite: bool, extend: bool) -> None:
        with _writing(self.path):
            if overwrite:
                for name in (ROLLOUTS_FILE, METRICS_FILE, PLAN_FILE):
                    (self.directory / name).unlink(missing_ok=True)
                self._media.remove()
            self._check_same(extend=extend)
            write_whole(self.directory / PLAN_FILE, self.plan.to_json().encode())
            if self.path.exists():
                cut_torn_line(self.path)
                if self.path.stat().st_size:
                    self._read()
            self._file = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        if not os.fstat(self._file).st_size:
            self._append(run_record(self.plan))

    def _check_same(self, *, extend: bool) -> None:
        held = read_plan(self.directory)
        if held is None:
            if self.path.exists() and self.path.stat().st_size:
                raise ConfigError(
                    f"{self.path} is there without a {PLAN_FILE}: it is no evaluation's; choose "
                    "another directory, or throw it away (overwrite)",
                    setting="output",
                )
            return
        if held.gymrl_version != self.plan.gymrl_version:
            logger.warning(
                "%s was begun with gymrl %s and goes on with %s",
                self.directory,
                held.gymrl_version,
                self.plan.gymrl_version,
            )
        differing = plan_differences(held, self.plan)
        if not differing or (extend and is_extension(held, self.plan)):
            return
        if not self._has_rows():
            # Nothing would be lost: the first attempt did not get as far as a row.
            self.path.unlink(missing_ok=True)
            return
        lines = "".join(f"\n  {line}" for line in differing)
        grows = is_extension(held, self.plan)
        hint = "add what is new to it (extend), " if grows else ""
        raise ConfigError(
            f"{self.directory} holds an evaluation of another plan:{lines}\n"
            f"Go on with the old plan, {hint}choose another directory, or throw away what is there "
            "(overwrite)",
            setting="output",
        )

    def _has_rows(self) -> bool:
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.readline()
            return bool(file.readline())

    def _read(self) -> None:
        seen: set[str] = set()
        for _, line in counting_lines(self.path, self.plan):
            key = (TaskKey(line.benchmark, line.task_digest), line.rollout_index)
            if key[0] not in self._known or line.rollout_id in seen:
                continue
            seen.add(line.rollout_id)
            if line.trajectory is not None:
                self._finished.add(key)
            elif line.counts_as_try:
                self._tries[key] = self._tries.get(key, 0) + 1

    @property
    def num_finished(self) -> int:
        """Rows of the plan that have a result."""
        return sum(repeat < self._known[key].repeats for key, repeat in self._finished)

    def pending(self, max_tries: int) -> Iterator[tuple[PendingRow, ...]]:
        """Rows that have no result and may be tried: every task once, then every task again.

        Rows that are compared with each other come together, all of them where one has no result;
        any other comes alone. A run that is ended early has looked at as many tasks as it could. What
        :meth:`add` adds meanwhile is not looked at.

        Args:
            max_tries: Rows that have failed as often are left as they are.
        """
        finished = frozenset(self._finished)
        tries = dict(self._tries)
        rounds = max((task.repeats for task in self._known.values()), default=0)
        for turn in range(rounds):
            for task in self._known.values():
                first = turn * task.group_size
                together = range(first, min(first + task.group_size, task.repeats))
                if all((task.key, repeat) in finished for repeat in together):
                    continue
                rows = tuple(
                    PendingRow(task, repeat, tries.get((task.key, repeat), 0))
                    for repeat in together
                )
                if max(row.tries for row in rows) < max_tries:
                    yield rows

    def add(self, *records: RowRecord, group: RolloutGroup | None = None) -> None:
        """Write the lines of rows that were made together, and the images that they refer to.

        Args:
            *records: The lines.
            group: Has the images; None: there are none.

        Raises:
            OutputError: There is no space, say; the file ends with the line before.
        """
        if group is not None:
            with _writing(self.path):
                self._media.write_group(group)
        self._append(*records)
        for record in records:
            key = (TaskKey(record.benchmark, record.task_digest), record.rollout_index)
            if record.trajectory is not None:
                self._finished.add(key)

    def _append(self, *records: RunRecord | RowRecord) -> None:
        if self._file is None:
            raise OutputError(f"{self.path} is closed", path=str(self.path))
        lines = memoryview(_encoder.encode_lines(records))
        with _writing(self.path):
            size = os.fstat(self._file).st_size
            try:
                while lines:
                    lines = lines[os.write(self._file, lines) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, size)
                raise

    def close(self) -> None:
        """Close the file and give the directory up. Safe to call twice."""
        held, self._file, self._lock = (self._file, self._lock), None, None
        for descriptor in held:
            if descriptor is not None:
                os.close(descriptor)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_plan(directory: Path) -> EvaluationPlan | None:
    """The plan of a directory; None where there is none.

    Raises:
        ConfigError: It cannot be read, or was changed.
    """
    path = directory / PLAN_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", setting="output") from error
    return EvaluationPlan.from_json(text, str(path))


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in its place in one step: readers see the old one or the new one.

    Raises:
        OutputError: It cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with _writing(path):
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}; what was written before is "
            "whole, and the run can be continued",
            path=str(path),
        ) from error


def _lock(directory: Path) -> int:
    """Hold the directory until the descriptor is closed, or this process ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}", setting="output") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            problem = f"cannot be locked: {error.strerror}; choose a directory on another disk"
        else:
            problem = (
                f"is being written by {holder or 'another process'}; wait for it or choose another "
                "directory"
            )
        raise ConfigError(f"{directory} {problem}", setting="output") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor
