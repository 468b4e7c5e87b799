"""Timings of several instances as one set of numbers.

Instances run side by side and a step waits for the slowest, so a rolled-up timing is the maximum,
not the sum. That holds for shares in percent too: an average over instances with unequal numbers of
rows would say nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMER_PREFIX = "timing/rollout"


def merge_timings(
    by_instance: Mapping[str, Mapping[str, float]], prefix: str = TIMER_PREFIX
) -> dict[str, float]:
    """Timings per instance and rolled up.

    Args:
        by_instance: What each instance reported on its last row, by its label.
        prefix: What the names begin with.

    Returns:
        One instance: what it reported, unchanged. Several: each ``<prefix>/<m>`` also as
        ``<prefix>/shard/<label>/<m>``, and ``<prefix>/<m>`` the maximum. None: nothing.
    """
    if len(by_instance) <= 1:
        return {name: value for report in by_instance.values() for name, value in report.items()}
    start = f"{prefix.rstrip('/')}/"
    merged: dict[str, float] = {}
    rolled_up: dict[str, float] = {}
    for label, report in by_instance.items():
        for name, value in report.items():
            merged[f"{start}shard/{label}/{name.removeprefix(start)}"] = value
            rolled_up[name] = max(value, rolled_up.get(name, value))
    return {**merged, **rolled_up}
