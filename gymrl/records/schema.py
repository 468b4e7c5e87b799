"""What a line of a file of rollouts holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gymrl._version import __version__
from gymrl.config import LogprobsMode
from gymrl.errors import RowValueError
from gymrl.routed_experts import RouteFormatError, decode_routes, encode_routes
from gymrl.types import (
    Failure,
    ImageRef,
    Reward,
    RoutesArray,
    Row,
    SideTrajectory,
    Trajectory,
    Turn,
    WeightVersionSpan,
)

if TYPE_CHECKING:
    from gymrl.records.media import MediaFolder

SCHEMA = 1
"""Of the lines that this version writes; older ones are read as well."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="record"):
    """The first line of a file.

    Attributes:
        schema: Of all lines of the file.
        config_digest: Of the configuration, without what only places or paces the run.
        gymrl_version: Who wrote it.
        notes: Whatever the writer wants to keep (a name, a benchmark, a checkpoint).
    """

    schema: int = SCHEMA
    config_digest: str = ""
    gymrl_version: str = __version__
    notes: dict[str, str] = {}


class SamplingRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a row's tokens were sampled, as its request said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    logprobs_mode: LogprobsMode | None = None


class SideTrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A :class:`~gymrl.types.SideTrajectory` with its arrays as lists, its routes as an envelope."""

    token_ids: list[int]
    logprobs: list[float]
    turns: tuple[Turn, ...]
    routed_experts: str | None = None
    images: tuple[tuple[ImageRef, ...], ...] = ()

    @classmethod
    def of(cls, side: SideTrajectory) -> SideTrajectoryRecord:
        """The record of a side trajectory."""
        return cls(
            token_ids=side.token_ids.tolist(),
            logprobs=side.logprobs.tolist(),
            turns=side.turns,
            routed_experts=written_routes(side.routed_experts),
            images=side.images,
        )

    def sample(self) -> SideTrajectory:
        """The side trajectory, its arrays as they were."""
        return SideTrajectory(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            turns=self.turns,
            routed_experts=_read_routes(self.routed_experts, len(self.token_ids)),
            images=self.images,
        )


def written_routes(routes: RoutesArray | None) -> str | None:
    """Routes as a file has them: see :func:`~gymrl.routed_experts.envelope.encode_routes`."""
    return None if routes is None else encode_routes(routes)


def _read_routes(envelope: str | None, num_tokens: int) -> RoutesArray | None:
    if envelope is None:
        return None
    routes = decode_routes(envelope)
    if len(routes) != num_tokens:
        raise RouteFormatError(f"{len(routes)} rows of routes for {num_tokens} tokens")
    return routes


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A :class:`~gymrl.types.Trajectory` with its arrays as lists and its answer as JSON.

    Its routes are an envelope (:mod:`gymrl.routed_experts`).
    """

    agent: str
    token_ids: list[int]
    logprobs: list[float]
    turns: tuple[Turn, ...]
    reward: Reward
    incomplete_reason: str | None = None
    mask_sample: bool = False
    placeholder: bool = False
    truncated_prefix: bool = False
    result: msgspec.Raw = msgspec.Raw(b"{}")
    notes: dict[str, int] = {}
    side_trajectories: tuple[SideTrajectoryRecord, ...] = ()
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    routed_experts: str | None = None
    images: tuple[tuple[ImageRef, ...], ...] = ()
    media: tuple[str, ...] = ()


class RowRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="row", tag_field="record"
):
    """One row: what was asked, how, and what became of it.

    Attributes:
        group: Index of its group in the run.
        group_size: Rows of that group, so that a reader knows when it has all.
        index: The row's batch-global index.
        task_digest: SHA-256 of the task without routing, indices and sampling.
        task: The body of the ``/run`` call; empty JSON where it was left out.
        media: Digests of the images that the task refers to
            (:class:`~gymrl.records.media.MediaFolder` has their bytes).
        trajectory: What the attempt gave, or None and `failure` says why.
        metrics: Of the group, on its last row.
        timings: Of the whole stream, on the last row of its last group.
        benchmark: The benchmark's label, in a file of an evaluation.
        task_id: The task's id there.
        cohort: Names the attempts that its verifier compared with each other, where it did: they
            count together. Attempts that were made again are of another one.
    """

    group: int
    group_size: int
    index: int
    task_index: int
    rollout_index: int
    route: str
    rollout_id: str
    task_digest: str
    sampling: SamplingRecord
    task: msgspec.Raw = msgspec.Raw(b"{}")
    media: tuple[str, ...] = ()
    trajectory: TrajectoryRecord | None = None
    failure: Failure | None = None
    metrics: dict[str, float] = {}
    timings: dict[str, float] | None = None
    benchmark: str = ""
    task_id: str = ""
    cohort: str = ""

    def row(self, folder: MediaFolder | None = None) -> Row:
        """The row as it was prepared; its body is empty JSON where the task was left out.

        Args:
            folder: Has the images; None: the row is without their bytes.
        """
        return Row(
            index=self.index,
            task_index=self.task_index,
            rollout_index=self.rollout_index,
            route=self.route,
            rollout_id=self.rollout_id,
            body=bytes(self.task),
            media={} if folder is None else folder.read(self.media),
        )

    def sample(self, folder: MediaFolder | None = None) -> Trajectory | Failure:
        """The trajectory, its arrays as they were; or the failure.

        Args:
            folder: Has the images; None: the trajectory is without their bytes.

        Raises:
            RowValueError: The record has neither, or routes that are none of its tokens'.
        """
        record = self.trajectory
        if record is None:
            if self.failure is None:
                raise RowValueError(
                    f"the record of row {self.index} has no trajectory and no failure",
                    row=self.index,
                )
            return self.failure
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        fields["token_ids"] = np.array(record.token_ids, dtype=np.int32)
        fields["logprobs"] = np.array(record.logprobs, dtype=np.float32)
        fields["result"] = bytes(record.result)
        fields["media"] = {} if folder is None else folder.read(record.media)
        try:
            fields["routed_experts"] = _read_routes(record.routed_experts, len(record.token_ids))
            fields["side_trajectories"] = tuple(s.sample() for s in record.side_trajectories)
        except RouteFormatError as error:
            raise RowValueError(
                f"the record of row {self.index}: routed_experts: {error}", row=self.index
            ) from error
        return Trajectory(**fields)
