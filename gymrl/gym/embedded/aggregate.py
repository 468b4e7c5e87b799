"""Metrics over many verdicts, as ``POST /aggregate_metrics`` answers them."""

from __future__ import annotations

import statistics
from typing import Any

_OWN_FIELDS = ("_ng_task_index", "_ng_rollout_index")


def aggregate(responses: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise verify answers by prompt and over all.

    Args:
        responses: Verify answers with ``reward``, ``_ng_task_index`` and ``_ng_rollout_index``;
            every further number in them is summarised too.

    Returns:
        ``group_level_metrics`` (one entry a prompt), ``agent_metrics`` and ``key_metrics``.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for response in responses:
        groups.setdefault(response.get("_ng_task_index"), []).append(response)
    return {
        "group_level_metrics": [
            {
                "_ng_task_index": index,
                **_statistics(members),
                "num_rollouts": len(members),
                "rollout_infos": [
                    {name: member.get(name) for name in (*_OWN_FIELDS, "reward")}
                    for member in members
                ],
            }
            for index, members in groups.items()
        ],
        "agent_metrics": _statistics(responses),
        "key_metrics": {
            name: value
            for name, value in _statistics(responses).items()
            if name.startswith("mean/")
        },
    }


def _statistics(responses: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for response in responses:
        for name, value in response.items():
            if name not in _OWN_FIELDS and type(value) in (int, float, bool):
                values.setdefault(name, []).append(float(value))
    result: dict[str, float] = {}
    for name, numbers in values.items():
        result |= {
            f"mean/{name}": statistics.fmean(numbers),
            f"max/{name}": max(numbers),
            f"min/{name}": min(numbers),
            f"median/{name}": statistics.median(numbers),
            f"std/{name}": statistics.stdev(numbers) if len(numbers) > 1 else 0.0,
        }
    return result
