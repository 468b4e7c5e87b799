"""What repeated attempts at tasks say, and how sure one may be. Arithmetic only.

Attempts at one task resemble each other, so the task is the unit everywhere: intervals are over
tasks, and so are comparisons. A failed attempt has no reward and enters nothing here; whoever calls
counts it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE = 0.95
"""Of every interval, unless a call says otherwise."""

HISTOGRAM_BINS = 20
"""Of every histogram, unless a call says otherwise."""

_SERIES_STEPS = 10_000
_TINY = 1e-300
_RELATIVE = 1e-14


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean, and the interval that its confidence level gives.

    Attributes:
        mean: The estimate.
        low: Lower end of the interval; None where none can be given (fewer than two tasks, all
            tasks alike: a spread of 0 in a sample is not certainty; or ends that no float can hold).
        high: Upper end, likewise.
        standard_error: Of `mean`; None with fewer than two tasks.
        tasks: Tasks behind it.
        values: Attempts behind it.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    tasks: int
    values: int


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Values counted in bins of equal width.

    Attributes:
        low: Where the first bin begins.
        high: Where the last one ends.
        counts: Values in each bin, ``[low + i * width, low + (i + 1) * width)``; the last bin has
            `high` as well.
    """

    low: float
    high: float
    counts: tuple[int, ...]


def reward_histogram(rewards: Sequence[float], bins: int = HISTOGRAM_BINS) -> Histogram | None:
    """How rewards are spread, from 0 or the least to 1 or the largest; None without any.

    Args:
        rewards: Finite numbers, in any order.
        bins: At least 1.

    Raises:
        ValueError: There are no bins.
    """
    if bins < 1:
        raise ValueError(f"bins={bins}: a histogram needs at least one")
    if not rewards:
        return None
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    counts = [0] * bins
    for reward in rewards:
        # Halved, since very large numbers may be too far apart for a float, and divided before
        # multiplied: their range has no finite reciprocal.
        share = (reward / 2 - low / 2) / (high / 2 - low / 2)
        counts[min(int(share * bins), bins - 1)] += 1
    return Histogram(low=low, high=high, counts=tuple(counts))


def clustered_mean(tasks: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> Estimate:
    """The mean over all values, with an interval clustered by task.

    With ``C`` tasks, ``n`` values and the residuals' sum ``r_c`` of each task, the standard error
    is ``sqrt(C / (C - 1) * sum(r_c ** 2)) / n`` (the clustered error of Miller, "Adding Error Bars
    to Evals", arXiv 2411.00640, eq. 4, with the correction for few clusters), and the interval is
    Student's t with ``C - 1`` degrees of freedom. Where every task has as many values, this is
    the t interval of the tasks' means.

    Args:
        tasks: The values of each task; tasks without any are left out.
        confidence: Between 0 and 1.

    Raises:
        ValueError: There is no value at all.
    """
    held = [values for values in tasks if values]
    count = sum(map(len, held))
    if not count:
        raise ValueError("a mean needs at least one value")
    mean = mean_of([value for values in held for value in values])
    if len(held) < 2:
        return Estimate(mean=mean, tasks=len(held), values=count)
    # Of the residuals' sums; a verifier's very large numbers have no squares that a float could hold.
    error = math.hypot(*(len(values) * (mean_of(values) - mean) / count for values in held))
    error *= math.sqrt(len(held) / (len(held) - 1))
    low, high = _interval(mean, error, len(held) - 1, confidence)
    return Estimate(
        mean=mean, low=low, high=high, standard_error=error, tasks=len(held), values=count
    )


def mean_of(values: Sequence[float]) -> float:
    """The mean, of numbers too that are too large to be added.

    Raises:
        ZeroDivisionError: There is none.
    """
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def mean_over_tasks(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of one value a task, with Student's t interval.

    Raises:
        ValueError: There is no value.
    """
    return clustered_mean([[value] for value in values], confidence)


def _interval(
    mean: float, error: float, degrees: int, confidence: float
) -> tuple[float | None, float | None]:
    # Rounding leaves a trace of spread where all values are alike.
    if error <= 1e-12 * max(1.0, abs(mean)):
        return None, None
    half = student_quantile((1 + confidence) / 2, degrees) * error
    low, high = mean - half, mean + half
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (None, None)


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """The unbiased estimate that at least one of `k` attempts passes.

    ``1 - C(n - c, k) / C(n, k)``: Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv 2107.03374, eq. 1.

    Args:
        attempts: Attempts at the task that have a reward, ``n``.
        passed: Of these, ``c``.
        k: At most `attempts`.

    Raises:
        ValueError: The numbers do not fit each other.
    """
    _check_counts(attempts, passed, k)
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, passed: int, k: int) -> float:
    """The unbiased estimate that all of `k` attempts pass.

    ``C(c, k) / C(n, k)``: Yao et al., "tau-bench", arXiv 2406.12045, section 3.

    Args:
        attempts: As :func:`pass_at_k`.
        passed: Of these.
        k: At most `attempts`.

    Raises:
        ValueError: The numbers do not fit each other.
    """
    _check_counts(attempts, passed, k)
    return math.comb(passed, k) / math.comb(attempts, k)


def _check_counts(attempts: int, passed: int, k: int) -> None:
    if not (0 < k <= attempts and 0 <= passed <= attempts):
        raise ValueError(
            f"attempts={attempts}, passed={passed}, k={k}: k is at least 1 and at most the number "
            "of attempts, and no more can pass than were made"
        )


def powers_up_to(repeats: int) -> tuple[int, ...]:
    """The numbers of attempts that are reported: 1, 2, 4, ... and `repeats` itself."""
    powers = [1 << place for place in range(repeats.bit_length()) if 1 << place <= repeats]
    return tuple(dict.fromkeys([*powers, repeats])) if repeats > 0 else ()


def sign_test(better: int, worse: int) -> float:
    """The exact two-sided p-value of `better` against `worse`, ties left out.

    Twice the binomial tail at one half, at most 1; 1 where there is nothing to compare.
    """
    if better < 0 or worse < 0:
        raise ValueError(f"better={better}, worse={worse}: counts are not negative")
    total = better + worse
    tail = sum(math.comb(total, count) for count in range(min(better, worse) + 1))
    # Whole numbers first: 2 ** total is beyond a float from 1024 on.
    return min(1.0, 2 * tail / (1 << total))


def percentile(ordered: Sequence[float], share: float) -> float:
    """A percentile of sorted values, linear between the two nearest.

    Args:
        ordered: Ascending, at least one.
        share: From 0 to 1.

    Raises:
        ValueError: There is no value.
    """
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution.

    Found by bisection of the distribution function, to fourteen digits.

    Args:
        probability: Above 0 and below 1.
        degrees: Of freedom, at least 1.

    Raises:
        ValueError: An argument is out of range.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"probability={probability}, degrees={degrees}: out of range")
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    high = 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    low = 0.0
    while high - low > _RELATIVE * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    """For ``t >= 0``, by the regularised incomplete beta function."""
    return 1.0 - _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function (Numerical Recipes, 3rd ed., section 6.4)."""
    if x in (0.0, 1.0):
        return x
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c = 1.0
    d = 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _SERIES_STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + term * d)
            c = _away_from_zero(1.0 + term / c)
            value *= c * d
        if abs(c * d - 1.0) < _RELATIVE:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
