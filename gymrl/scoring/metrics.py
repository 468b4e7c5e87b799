"""Numbers about finished trajectories. They are read, never changed.

A failed sample is in no mean and no baseline; it is counted under ``rollout_failures/``. A masked
one counts like any other: it is left out of the loss alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymrl.routed_experts import num_expected_routes, unknown_routes
from gymrl.scoring.answer import Answer
from gymrl.scoring.length_penalty.apply import env_reward
from gymrl.scoring.masks import hit_max_tokens
from gymrl.scoring.stats import GroupStats, RouteCounts, stddev
from gymrl.types import Failure, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.types import RolloutGroup

SHARED_GENRM_METRICS = (
    "reward_score_raw",
    "reward_rubric_aggregate_valid",
    "reward_overall_score_raw",
    "reward_overall_score",
    "reward_length_adjustment",
    "genrm_parse_failure_rate_per_group",
    "genrm_rubric_parse_failure_rate_per_group",
    "genrm_input_tokens_per_comparison_mean",
    "genrm_input_tokens_per_comparison_p50",
    "genrm_input_tokens_per_comparison_p95",
    "genrm_output_tokens_per_comparison_mean",
    "genrm_output_tokens_per_comparison_p50",
    "genrm_output_tokens_per_comparison_p95",
    "genrm_output_tokens_total_per_group",
    "genrm_max_output_tokens_hit_rate_per_group",
)
"""Scalars of generative reward models, averaged over all agents where an answer has them."""


def group_stats(
    group: RolloutGroup, *, max_total_tokens: int | None = None, with_tables: bool = False
) -> GroupStats:
    """The metrics of a scored group that do not depend on how it was scored.

    Args:
        group: Its trajectories' results are decoded here.
        max_total_tokens: The generator's context, for the truncation rate; None: reasons only.
        with_tables: Keep each result's JSON under ``<agent>/full_result``.
    """
    answers = [Answer(s.result) if isinstance(s, Trajectory) else None for s in group.samples]
    return measure(group, answers, max_total_tokens=max_total_tokens, with_tables=with_tables)


def measure(
    group: RolloutGroup,
    answers: Sequence[Answer | None],
    *,
    max_total_tokens: int | None,
    with_tables: bool,
) -> GroupStats:
    """:func:`group_stats` with the results already decoded, one for each sample."""
    pairs = [
        (sample, answer)
        for sample, answer in zip(group.samples, answers, strict=True)
        if isinstance(sample, Trajectory) and answer is not None
    ]
    parts = [
        size_stats([trajectory for trajectory, _ in pairs]),
        _termination_stats(pairs, max_total_tokens),
        agent_stats(pairs),
        diagnostic_stats([trajectory for trajectory, _ in pairs]),
        route_stats([trajectory for trajectory, _ in pairs]),
        failure_stats(group.failures),
    ]
    if with_tables:
        parts.append(_tables(group))
    return GroupStats.merged(parts)


def size_stats(trajectories: Sequence[Trajectory]) -> GroupStats:
    """Turns, tokens and total reward of each sample.

    ``turns_per_sample``, ``total_tokens_per_sample``, ``gen_tokens_per_sample``,
    ``max_gen_tokens_per_turn`` and ``total_reward`` as distributions, and
    ``mean_gen_tokens_per_sample``.
    """
    if not trajectories:
        return GroupStats()
    generated = tuple(float(t.num_generated) for t in trajectories)
    return GroupStats(
        distributions={
            "turns_per_sample": tuple(float(len(t.turns)) for t in trajectories),
            "total_tokens_per_sample": tuple(float(t.num_tokens) for t in trajectories),
            "gen_tokens_per_sample": generated,
            "max_gen_tokens_per_turn": tuple(
                float(max((u.end - u.generation_start for u in t.turns), default=0))
                for t in trajectories
            ),
            "total_reward": tuple(t.reward.total for t in trajectories),
        },
        means={"mean_gen_tokens_per_sample": generated},
    )


def agent_stats(pairs: Sequence[tuple[Trajectory, Answer]]) -> GroupStats:
    """``<agent>/<key>`` for every scalar of the results, over the union of their keys.

    A key's values are those of the samples that have it. ``reward`` is the total after scoring.
    The scalars of generative reward models are also averaged under their own names.
    """
    series: dict[str, list[float]] = {}
    shared: dict[str, list[float]] = {}
    for trajectory, answer in pairs:
        scalars = {**answer.scalars, "reward": trajectory.reward.total}
        for name, value in scalars.items():
            series.setdefault(f"{trajectory.agent}/{name}", []).append(value)
        for name in SHARED_GENRM_METRICS:
            if name in scalars:
                shared.setdefault(name, []).append(scalars[name])
    return GroupStats(
        distributions={name: tuple(values) for name, values in series.items()},
        means={name: tuple(values) for name, values in shared.items()},
    )


def diagnostic_stats(trajectories: Sequence[Trajectory]) -> GroupStats:
    """What one prompt's rewards say about it; each value counts a whole group once.

    ``baseline_reward/pct_0`` and ``pct_1``: percent of groups whose rewards before the length
    rules are all 0, or all 1; ``pct_mixed`` is every other group. ``group_reward_std/mean`` and
    ``group_reward_range/mean``: spread of the totals within a group (0 for a single sample).
    """
    if not trajectories:
        return GroupStats()
    before = [env_reward(t.reward) for t in trajectories]
    totals = [t.reward.total for t in trajectories]
    all_wrong = all(value == 0 for value in before)
    all_right = all(value == 1 for value in before)
    return GroupStats(
        means={
            "baseline_reward/pct_0": (100.0 * all_wrong,),
            "baseline_reward/pct_1": (100.0 * all_right,),
            "baseline_reward/pct_mixed": (100.0 * (not all_wrong and not all_right),),
            "group_reward_std/mean": (stddev(totals),),
            "group_reward_range/mean": (max(totals) - min(totals),),
        }
    )


def route_stats(trajectories: Sequence[Trajectory]) -> GroupStats:
    """How many tokens' routes are left to the trainer's own router; metrics where a sample has some.

    ``r3/routed_experts_expected_token_routes`` counts the tokens that a loss may depend on: all up
    to the last sampled one, that one not included. Of these
    ``r3/routed_experts_actual_token_routes`` have routes and
    ``r3/routed_experts_fallback_token_routes`` have none, which is
    ``r3/routed_experts_fallback_token_route_fraction`` of them (0.0 where nothing was expected);
    ``r3/routed_experts_fallback_samples`` have such a token.
    """
    routed = sum(trajectory.routed_experts is not None for trajectory in trajectories)
    expected = missing = samples = 0
    for trajectory in trajectories:
        spans = [(turn.generation_start, turn.end) for turn in trajectory.turns]
        count = num_expected_routes(spans)
        unknown = count
        if trajectory.routed_experts is not None:
            unknown = unknown_routes(trajectory.routed_experts, spans)
        expected, missing, samples = expected + count, missing + unknown, samples + (unknown > 0)
    return GroupStats(
        routes=RouteCounts(
            routed_samples=routed,
            fallback_samples=samples,
            fallback=missing,
            expected=expected,
        )
    )


def failure_stats(failures: Sequence[Failure]) -> GroupStats:
    """``rollout_failures/<class>``: counts by kind (infra, data) and by the error's type."""
    counts: dict[str, int] = {}
    for failure in failures:
        for label in (str(failure.kind), failure.error):
            name = f"rollout_failures/{label}"
            counts[name] = counts.get(name, 0) + 1
    return GroupStats(counts=counts)


def _termination_stats(
    pairs: Sequence[tuple[Trajectory, Answer]], max_total_tokens: int | None
) -> GroupStats:
    """``truncation_rate``, and ``natural_termination_rate``: neither cut off nor without a turn."""
    if not pairs:
        return GroupStats()
    truncated = tuple(hit_max_tokens(t, max_total_tokens, answer) for t, answer in pairs)
    return GroupStats(
        means={
            "truncation_rate": tuple(float(cut) for cut in truncated),
            "natural_termination_rate": tuple(
                float(not cut and not t.placeholder)
                for cut, (t, _) in zip(truncated, pairs, strict=True)
            ),
        }
    )


def _tables(group: RolloutGroup) -> GroupStats:
    tables: dict[str, list[tuple[int, str]]] = {}
    for row, sample in zip(group.rows, group.samples, strict=True):
        if isinstance(sample, Trajectory):
            tables.setdefault(f"{sample.agent}/full_result", []).append(
                (row.index, sample.result.decode("utf-8"))
            )
    return GroupStats(tables={name: tuple(rows) for name, rows in tables.items()})
