"""What a display may know of a run while it goes on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gymrl.scoring import GroupStats
    from gymrl.types import RolloutGroup, RowResult


class RolloutObserver(Protocol):
    """Told of each row and group as it happens, in the event loop.

    Both calls should return at once; what they raise ends the run.
    """

    def on_row(self, result: RowResult, instance: str) -> None:
        """A row has its outcome (a failure only when it is not dispatched again)."""
        ...

    def on_group(self, group: RolloutGroup, stats: GroupStats) -> None:
        """A group is scored and about to be handed over.

        Args:
            group: With its metrics.
            stats: The values behind the metrics, which combine exactly with those of others.
        """
        ...


@dataclasses.dataclass(slots=True)
class Progress:
    """Counters over all streams of an engine, since it was entered.

    Attributes:
        rows: Rows asked for.
        rows_done: Rows with a trajectory.
        rows_failed: Rows without one, after their last attempt.
        redispatches: Attempts beyond each row's first.
        groups: Groups asked for.
        groups_done: Groups handed over.
        groups_dropped: Groups left out by the failure policy.
        tokens_generated: Sampled tokens of the rows done.
        failures: Failed rows by the error's class.
        timings: Of the last stream that ran to its end, merged over instances.
    """

    rows: int = 0
    rows_done: int = 0
    rows_failed: int = 0
    redispatches: int = 0
    groups: int = 0
    groups_done: int = 0
    groups_dropped: int = 0
    tokens_generated: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
