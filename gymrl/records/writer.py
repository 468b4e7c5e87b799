"""Groups to lines, and lines to a file."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from gymrl.errors import BadLogprobsError, ConfigError, RewardContractError
from gymrl.numbers import finite_float
from gymrl.records.digests import task_digest
from gymrl.records.media import MediaFolder
from gymrl.records.reader import check_same_run, cut_torn_line, read_run
from gymrl.records.schema import (
    RowRecord,
    RunRecord,
    SamplingRecord,
    SideTrajectoryRecord,
    TrajectoryRecord,
    written_routes,
)
from gymrl.types import Failure, Trajectory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO
    from types import TracebackType

    from gymrl.config import LogprobsMode
    from gymrl.types import RolloutGroup, Row

_encoder = msgspec.json.Encoder()


class _Params(msgspec.Struct, frozen=True):
    """What a row asks for. A row may hold anything here, and is written all the same."""

    temperature: Any = None
    top_p: Any = None
    max_output_tokens: Any = None
    metadata: Any = None

    def extra_body(self) -> dict[str, Any]:
        """The options that travel as JSON text; empty where there is no such text."""
        text = self.metadata.get("extra_body") if isinstance(self.metadata, dict) else None
        if not isinstance(text, str):
            return {}
        try:
            options = msgspec.json.decode(text.encode("utf-8", "replace"))
        except (msgspec.DecodeError, RecursionError):
            return {}
        return options if isinstance(options, dict) else {}


class _Body(msgspec.Struct, frozen=True):
    responses_create_params: _Params = _Params()


def _sampling_of(row: Row, logprobs_mode: LogprobsMode | None) -> SamplingRecord:
    params = msgspec.json.decode(row.body, type=_Body).responses_create_params
    extra = params.extra_body()
    return SamplingRecord(
        temperature=finite_float(params.temperature),
        top_p=finite_float(params.top_p),
        top_k=_integer(extra.get("top_k")),
        max_tokens=_integer(params.max_output_tokens),
        seed=_integer(extra.get("seed")),
        logprobs_mode=logprobs_mode,
    )


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def records_of(
    group: RolloutGroup, *, logprobs_mode: LogprobsMode | None = None, with_task: bool = True
) -> list[RowRecord]:
    """The records of a group, one a row.

    Args:
        group: As the engine gave it.
        logprobs_mode: Which distribution the log-probabilities are of.
        with_task: Keep each row's request.

    Raises:
        BadLogprobsError: A log-probability is not finite. JSON would make it null.
        RewardContractError: A reward is not finite.
    """
    last = len(group.rows) - 1
    records = []
    for place, (row, outcome) in enumerate(zip(group.rows, group.samples, strict=True)):
        records.append(
            RowRecord(
                group=group.index,
                group_size=len(group.rows),
                index=row.index,
                task_index=row.task_index,
                rollout_index=row.rollout_index,
                route=row.route,
                rollout_id=row.rollout_id,
                task_digest=task_digest(row.body),
                sampling=_sampling_of(row, logprobs_mode),
                task=msgspec.Raw(_one_line(row.body) if with_task else b"{}"),
                media=tuple(row.media) if with_task else (),
                trajectory=_trajectory_record(outcome, row.index)
                if isinstance(outcome, Trajectory)
                else None,
                failure=_writable(outcome) if isinstance(outcome, Failure) else None,
                metrics=_finite(group.metrics) if place == last else {},
                timings=group.timings if place == last else None,
            )
        )
    return records


def _trajectory_record(trajectory: Trajectory, index: int) -> TrajectoryRecord:
    finite = np.isfinite(trajectory.logprobs)
    if not finite.all():
        position = int(np.argmin(finite))
        raise BadLogprobsError(
            f"row {index}: the log-probability at token {position} is "
            f"{trajectory.logprobs[position]}; only finite ones are written",
            row=index,
            agent=trajectory.agent,
            position=position,
        )
    reward = trajectory.reward
    values = [reward.verifier, *(reward.components or {}).values()]
    if not all(map(math.isfinite, [*values, *(entry.value for entry in reward.adjustments)])):
        raise RewardContractError(
            f"row {index}: the reward ledger {reward} holds a number that is not finite",
            row=index,
            agent=trajectory.agent,
        )
    fields = {name: getattr(trajectory, name) for name in TrajectoryRecord.__struct_fields__}
    fields["token_ids"] = trajectory.token_ids.tolist()
    fields["logprobs"] = trajectory.logprobs.tolist()
    fields["side_trajectories"] = tuple(
        SideTrajectoryRecord.of(side) for side in trajectory.side_trajectories
    )
    fields["routed_experts"] = written_routes(trajectory.routed_experts)
    fields["media"] = tuple(trajectory.media)
    fields["result"] = msgspec.Raw(_one_line(trajectory.result))
    return TrajectoryRecord(**fields)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that JSON has a form for; a null in the place of a number could not be read back."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _one_line(json: bytes) -> bytes:
    return msgspec.json.format(json, indent=-1)


def _writable(failure: Failure) -> Failure:
    """The failure with lone surrogates of foreign texts replaced."""
    return msgspec.structs.replace(
        failure,
        message=failure.message.encode("utf-8", "replace").decode(),
        traceback=failure.traceback.encode("utf-8", "replace").decode(),
    )


class RecordWriter:
    """Write rollouts to a file, each line at once, and their images into a folder beside it.

    A context manager. Writing is a blocking call of a few microseconds a line.

    Args:
        path: The file; its directory must exist.
        run: The first line of a new file. When an existing file is continued, its
            `config_digest` must be the same.
        append: Continue a file that may exist. Without it an existing file is refused.
        logprobs_mode: Written with every row.
        with_task: Keep each row's request.

    Raises:
        ConfigError: The file exists, can't be opened, or is of another configuration or schema.
    """

    def __init__(
        self,
        path: str | Path,
        run: RunRecord,
        *,
        append: bool = False,
        logprobs_mode: LogprobsMode | None = None,
        with_task: bool = True,
    ) -> None:
        self.path = Path(path)
        self._media = MediaFolder(self.path)
        self._logprobs_mode = logprobs_mode
        self._with_task = with_task
        continued = False
        if append and self.path.exists() and self.path.stat().st_size:
            cut_torn_line(self.path)
            continued = self.path.stat().st_size > 0
        if continued:
            check_same_run(self.path, read_run(self.path), run.config_digest)
        try:
            self._file: FileIO = self.path.open("ab" if append else "xb", buffering=0)
        except FileExistsError:
            raise ConfigError(
                f"{self.path} exists; continue it (append) or choose another path",
                setting=str(self.path),
            ) from None
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}", setting=str(self.path)) from error
        if not continued:
            try:
                self._write(run)
            except BaseException:
                self._file.close()
                raise

    def write(self, group: RolloutGroup) -> None:
        """Write every row of a group.

        Raises:
            BadLogprobsError, RewardContractError: As :func:`records_of`; nothing was written.
            OSError: The disk is full, say. The line that did not fit is taken back, so that the
                file stays whole; those of the group that did fit are there.
        """
        records = records_of(group, logprobs_mode=self._logprobs_mode, with_task=self._with_task)
        self._media.write_group(group, with_task=self._with_task)
        for record in records:
            self._write(record)

    def _write(self, record: RunRecord | RowRecord) -> None:
        line = memoryview(_encoder.encode(record) + b"\n")
        start = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except BaseException:
            self._file.truncate(start)
            raise

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
