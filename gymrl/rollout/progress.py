"""What a display may know of a run while it goes on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from gymrl.errors import RolloutTimeout, RowRejected
from gymrl.media import MediaPayload

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
    """Counters: of one stream, or over all streams of an engine since it was entered.

    Attributes:
        rows: Rows asked for.
        rows_done: Rows with a trajectory.
        rows_failed: Rows without one, after their last attempt.
        rows_rejected: Rows of these whose trajectory the caller's `accept` refused.
        redispatches: Attempts beyond each row's first.
        groups: Groups asked for.
        groups_done: Groups handed over.
        groups_dropped: Groups left out by the failure policy.
        tokens_generated: Sampled tokens of the rows done.
        failures: Failed rows by the error's class.
        stragglers: Rows that a deadline ended, by agent.
        media: Images that crossed between driver and workers, with and without their repeats.
        timings: Of the stream, or of the last one that ran to its end, merged over instances.
    """

    rows: int = 0
    rows_done: int = 0
    rows_failed: int = 0
    rows_rejected: int = 0
    redispatches: int = 0
    groups: int = 0
    groups_done: int = 0
    groups_dropped: int = 0
    tokens_generated: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)
    stragglers: dict[str, int] = dataclasses.field(default_factory=dict)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    media: MediaPayload = dataclasses.field(default_factory=MediaPayload)

    def add_failure(self, error: str, agent: str) -> None:
        """Count a row that failed for good.

        Args:
            error: The error's class.
            agent: Who was to serve it.
        """
        self.rows_failed += 1
        self.failures[error] = self.failures.get(error, 0) + 1
        if error == RolloutTimeout.__name__:
            self.stragglers[agent] = self.stragglers.get(agent, 0) + 1
        if error == RowRejected.__name__:
            self.rows_rejected += 1

    def metrics(self) -> dict[str, float]:
        """The incidents as numbers for a tracker, dropped groups included.

        ``rollout_failures/<class>``, ``rollout_stragglers/<agent>``, ``rollout_redispatches``,
        ``rollout_rejected_rows`` and ``rollout_dropped_groups``; and where there were images
        ``media_payload/<count>`` (:class:`gymrl.media.MediaPayload`).
        """
        numbers = {f"rollout_failures/{name}": count for name, count in self.failures.items()}
        numbers |= {f"rollout_stragglers/{name}": n for name, n in self.stragglers.items()}
        numbers |= {
            "rollout_redispatches": self.redispatches,
            "rollout_rejected_rows": self.rows_rejected,
            "rollout_dropped_groups": self.groups_dropped,
        }
        media = self.media.metrics() if self.media.images else {}
        return {name: float(number) for name, number in numbers.items()} | media
