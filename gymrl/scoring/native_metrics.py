"""Numbers about native rollouts, under the names that trainers of NeMo RL's shape plot.

Everything is read off finished trajectories: their turns, and the facts that a native result
carries (``terminated``, ``truncated``, ``max_turns_reached``, ``prompt_tokens``, ``env_tokens``,
``num_turns``, ``worker``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymrl.scoring.answer import Answer
from gymrl.scoring.metrics import agent_stats, diagnostic_stats, failure_stats, route_stats
from gymrl.scoring.stats import GroupStats
from gymrl.types import Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.types import RolloutGroup

_FACTS = ("prompt_tokens", "num_turns", "env_tokens", "worker")
_ENDS = ("terminated", "truncated", "max_turns_reached")


def native_group_stats(group: RolloutGroup) -> GroupStats:
    """The metrics of one group of native rollouts.

    Distributions (``<name>/{mean,max,min,median,stddev,p95,p99,histogram}``) over samples:
    ``turns_per_sample``, ``total_tokens_per_sample`` (prompt, answers and observations),
    ``gen_tokens_per_sample``, ``env_tokens_per_sample``, ``max_gen_tokens_per_turn`` and
    ``total_reward``; over turns: ``gen_tokens_length`` (sampled), ``input_tokens_length`` (of the
    call's prompt) and ``total_tokens_length``. Means over samples: ``natural_termination_rate``
    (terminated and not truncated), ``truncation_rate``, ``max_turns_reached_rate``. Counts:
    ``total_turns`` and ``per_worker_token_counts/<worker>`` (sampled tokens by generator).

    Where a sample has routes, those of :func:`~gymrl.scoring.metrics.route_stats` as well. Failed
    samples are in none of these; they are counted under ``rollout_failures/``.
    """
    pairs = [
        (sample, Answer(sample.result))
        for sample in group.samples
        if isinstance(sample, Trajectory)
    ]
    return GroupStats.merged(
        [
            _episode_stats(pairs),
            _turn_stats([trajectory for trajectory, _ in pairs]),
            agent_stats(pairs),
            diagnostic_stats([trajectory for trajectory, _ in pairs]),
            route_stats([trajectory for trajectory, _ in pairs]),
            failure_stats(group.failures),
        ]
    )


def native_scalars(stats: GroupStats) -> dict[str, float]:
    """Every metric that is one number, with the short names that older plots read as well.

    ``avg_turns_per_sample``, ``max_turns_per_sample``, ``mean_/max_gen_tokens_per_sample``,
    ``mean_total_tokens_per_sample``, ``mean_env_tokens_per_sample`` and
    ``mean_/max_/min_total_reward`` repeat values of the distributions.
    """
    found = stats.scalars()
    for short, name in _SHORT_NAMES.items():
        if name in found:
            found[short] = found[name]
    return found


def native_histograms(stats: GroupStats) -> dict[str, list[float]]:
    """Observations by name: ``<name>/histogram``, and ``histogram/<name>`` for those over turns."""
    found = stats.histograms()
    for name in ("gen_tokens_length", "input_tokens_length", "total_tokens_length"):
        if f"{name}/histogram" in found:
            found[f"histogram/{name}"] = found[f"{name}/histogram"]
    return found


_SHORT_NAMES = {
    "avg_turns_per_sample": "turns_per_sample/mean",
    "max_turns_per_sample": "turns_per_sample/max",
    "mean_total_tokens_per_sample": "total_tokens_per_sample/mean",
    "mean_gen_tokens_per_sample": "gen_tokens_per_sample/mean",
    "max_gen_tokens_per_sample": "gen_tokens_per_sample/max",
    "mean_env_tokens_per_sample": "env_tokens_per_sample/mean",
    "mean_total_reward": "total_reward/mean",
    "max_total_reward": "total_reward/max",
    "min_total_reward": "total_reward/min",
}


def _episode_stats(pairs: Sequence[tuple[Trajectory, Answer]]) -> GroupStats:
    if not pairs:
        return GroupStats()
    facts = [{name: answer.scalars.get(name, 0.0) for name in _FACTS} for _, answer in pairs]
    ends = [{name: answer.value(name) is True for name in _ENDS} for _, answer in pairs]
    generated = [float(trajectory.num_generated) for trajectory, _ in pairs]
    counts = {"total_turns": int(sum(fact["num_turns"] for fact in facts))}
    for fact, tokens in zip(facts, generated, strict=True):
        name = f"per_worker_token_counts/{int(fact['worker'])}"
        counts[name] = counts.get(name, 0) + int(tokens)
    return GroupStats(
        distributions={
            "turns_per_sample": tuple(fact["num_turns"] for fact in facts),
            "total_tokens_per_sample": tuple(
                fact["prompt_tokens"] + fact["env_tokens"] + tokens
                for fact, tokens in zip(facts, generated, strict=True)
            ),
            "gen_tokens_per_sample": tuple(generated),
            "env_tokens_per_sample": tuple(fact["env_tokens"] for fact in facts),
            "max_gen_tokens_per_turn": tuple(
                float(max((turn.end - turn.generation_start for turn in t.turns), default=0))
                for t, _ in pairs
            ),
            "total_reward": tuple(trajectory.reward.total for trajectory, _ in pairs),
        },
        means={
            "natural_termination_rate": tuple(
                float(end["terminated"] and not end["truncated"]) for end in ends
            ),
            "truncation_rate": tuple(float(end["truncated"]) for end in ends),
            "max_turns_reached_rate": tuple(float(end["max_turns_reached"]) for end in ends),
        },
        counts=counts,
    )


def _turn_stats(trajectories: Sequence[Trajectory]) -> GroupStats:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if not turns:
        return GroupStats()
    return GroupStats(
        distributions={
            "gen_tokens_length": tuple(float(turn.end - turn.generation_start) for turn in turns),
            "input_tokens_length": tuple(float(turn.generation_start) for turn in turns),
            "total_tokens_length": tuple(float(turn.end) for turn in turns),
        }
    )
