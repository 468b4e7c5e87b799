"""The arithmetic of the length rules, each over the rollouts of one prompt.

Every function takes a length and a score for each rollout, in row order, and gives what each gains
or loses. Scores are the rewards before any length rule; only rollouts with a score above 0 are
compared and adjusted. Ties go to the rollout that comes first in row order.

Source of the rules: NeMo RL's guide on length penalties.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from gymrl.scoring.stats import mean, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.scoring.length_penalty.config import Band

MODIFIED_Z_FACTOR = 0.6745
"""Third quartile of the normal distribution, which makes a MAD comparable to a deviation."""
MIN_RELATIVE_MAD = 0.015
"""A group whose median deviation is a smaller share of its median has no outliers."""


def positives(scores: Sequence[float]) -> list[int]:
    """The rollouts that rules compare: those with a score above 0."""
    return [index for index, score in enumerate(scores) if score > 0]


def top_scorers(scores: Sequence[float], top_percentile: float) -> list[int]:
    """The positive rollouts within the top share by score, ties with the last of them included."""
    candidates = positives(scores)
    if not candidates:
        return []
    ranked = sorted((scores[index] for index in candidates), reverse=True)
    threshold = ranked[max(0, int(len(ranked) * top_percentile) - 1)]
    return [index for index in candidates if scores[index] >= threshold]


def shortest_bonus(
    lengths: Sequence[int], scores: Sequence[float], bonus: float, top_percentile: float
) -> list[float]:
    """The shortest positive rollout that is not empty gains `bonus`, if it is a top scorer."""
    deltas = [0.0] * len(scores)
    candidates = [index for index in positives(scores) if lengths[index] > 0]
    if candidates:
        shortest = min(candidates, key=lambda index: lengths[index])
        if shortest in top_scorers(scores, top_percentile):
            deltas[shortest] = bonus
    return deltas


def longest_penalty(
    lengths: Sequence[int], scores: Sequence[float], penalty: float, top_percentile: float
) -> list[float]:
    """The longest top scorer loses `penalty`; two that are not empty must be there to compare."""
    deltas = [0.0] * len(scores)
    candidates = [index for index in top_scorers(scores, top_percentile) if lengths[index] > 0]
    if len(candidates) >= 2:
        deltas[max(candidates, key=lambda index: lengths[index])] = -penalty
    return deltas


def relative_scaling(
    lengths: Sequence[int], scores: Sequence[float], coefficient: float
) -> list[float]:
    """Shorter positive rollouts gain, longer ones lose, and the sum over them is 0.

    ``coefficient * (raw - mean(raw))`` with ``raw = 1 - (length - min) / (max - min)``; 0 where
    all lengths are equal.
    """
    deltas = [0.0] * len(scores)
    candidates = positives(scores)
    if not candidates:
        return deltas
    shortest = min(lengths[index] for index in candidates)
    span = max(lengths[index] for index in candidates) - shortest
    if span == 0:
        return deltas
    raw = [1.0 - (lengths[index] - shortest) / span for index in candidates]
    center = mean(raw)
    for index, weight in zip(candidates, raw, strict=True):
        deltas[index] = coefficient * (weight - center)
    return deltas


def zmad_penalty(
    lengths: Sequence[int], scores: Sequence[float], threshold: float, penalty: float
) -> list[float]:
    """Positive rollouts that are outliers on the long side lose `penalty`.

    The modified z score of Iglewicz and Hoaglin, ``0.6745 * (length - median) / MAD``, above
    `threshold` makes an outlier. Nobody is one where the MAD is under 0.015 of the median.
    """
    deltas = [0.0] * len(scores)
    candidates = positives(scores)
    if threshold <= 0 or not candidates:
        return deltas
    median = statistics.median([lengths[index] for index in candidates])
    mad = statistics.median([abs(lengths[index] - median) for index in candidates])
    if mad == 0 or mad < MIN_RELATIVE_MAD * median:
        return deltas
    for index in candidates:
        if MODIFIED_Z_FACTOR * (lengths[index] - median) / mad > threshold:
            deltas[index] = -penalty
    return deltas


def profiled_threshold(passing: Sequence[float], n_std: float, min_samples: int) -> float | None:
    """``mean + n_std * std`` of the profiled lengths that passed; None below `min_samples`.

    The deviation is the population's (divisor n): the rules' source does not say which, and the
    profile is all there is of the prompt's attempts.
    """
    if len(passing) < max(1, min_samples):
        return None
    return mean(passing) + n_std * spread(passing, len(passing))


def profiled_penalty(
    totals: Sequence[int], scores: Sequence[float], threshold: float | None, penalty: float
) -> list[float]:
    """Positive rollouts whose total reaches `threshold` lose `penalty`; None: nobody does."""
    deltas = [0.0] * len(scores)
    if threshold is not None:
        for index in positives(scores):
            if totals[index] >= threshold:
                deltas[index] = -penalty
    return deltas


def pass_rate_penalty(totals: Sequence[int], scores: Sequence[float], weight: float) -> list[float]:
    """Positive rollouts lose ``weight * pass_rate * total / l_max``.

    The pass rate is the share of positive rollouts, `l_max` the longest total among them.
    """
    deltas = [0.0] * len(scores)
    candidates = positives(scores)
    longest = max((totals[index] for index in candidates), default=0)
    if longest > 0:
        pass_rate = len(candidates) / len(scores)
        for index in candidates:
            deltas[index] = -weight * pass_rate * totals[index] / longest
    return deltas


def band_multiplier(length: float, band: Band) -> float:
    """1 up to `a`, linear down to `f` at `b`, `f` beyond."""
    if length <= band.a:
        return 1.0
    if length >= band.b:
        return band.f
    return 1.0 - (length - band.a) / (band.b - band.a) * (1.0 - band.f)
