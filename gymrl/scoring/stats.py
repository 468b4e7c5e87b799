"""Numbers about groups that combine exactly.

A group's numbers are kept as the values behind them. Groups of different sizes then combine into
just what the whole batch would have given: sums and counts add up, percentiles come from the
pooled values, and no mean is taken of means. Sums are ``math.fsum``, so the order in which
groups complete changes nothing, not even the last bit.
"""

from __future__ import annotations

import math
import statistics
import sys
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ValueT = TypeVar("ValueT")


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value, correctly rounded whatever their order."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum is beyond floats; the mean is not
        return math.fsum(value / len(values) for value in values)


def stddev(values: Sequence[float]) -> float:
    """Sample standard deviation (divisor n - 1); 0.0 for a single value, never NaN."""
    return spread(values, len(values) - 1) if len(values) > 1 else 0.0


def spread(values: Sequence[float], divisor: int) -> float:
    """Root of the squared distances from the mean over `divisor`; the largest float at most."""
    center = mean(values)
    try:
        return math.sqrt(math.fsum((value - center) ** 2 for value in values) / divisor)
    except OverflowError:
        root = math.hypot(*((value - center) / math.sqrt(divisor) for value in values))
        return min(root, sys.float_info.max)  # a metric that is infinite could not be written


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at index ``floor(n * percent / 100)`` of the sorted values, the last at most.

    It is always one of the values: nothing is interpolated.
    """
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


class RouteCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens have no route, so that the trainer's own router decides.

    See :func:`gymrl.scoring.metrics.route_stats`.

    Attributes:
        routed_samples: Samples with routes.
        fallback_samples: Samples with a token whose route is not known.
        fallback: Such tokens.
        expected: Tokens whose route a loss may depend on.
    """

    routed_samples: int = 0
    fallback_samples: int = 0
    fallback: int = 0
    expected: int = 0

    @classmethod
    def merged(cls, parts: Iterable[RouteCounts]) -> RouteCounts:
        """All parts as one."""
        together = list(parts)
        sums = {n: sum(getattr(part, n) for part in together) for n in cls.__struct_fields__}
        return cls(**sums)

    def scalars(self) -> dict[str, float]:
        """Metrics by name; none where no sample has routes."""
        if not self.routed_samples:
            return {}
        prefix = "r3/routed_experts_"
        return {
            f"{prefix}fallback_samples": float(self.fallback_samples),
            f"{prefix}fallback_token_routes": float(self.fallback),
            f"{prefix}expected_token_routes": float(self.expected),
            f"{prefix}actual_token_routes": float(self.expected - self.fallback),
            f"{prefix}fallback_token_route_fraction": (
                self.fallback / self.expected if self.expected else 0.0
            ),
        }


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """The values behind the metrics of one group, or of many.

    Attributes:
        distributions: Values by name, reported as ``<name>/{mean,max,min,median,stddev,p95,p99}``
            and ``<name>/histogram``.
        means: Values by metric name, reported as their mean.
        medians: Values by metric name, reported as their median.
        counts: Sums by metric name.
        routes: Of mixture-of-experts models; reported where some sample has routes.
        tables: By metric name, (row index, row of JSON) pairs.
    """

    distributions: dict[str, tuple[float, ...]] = {}
    means: dict[str, tuple[float, ...]] = {}
    medians: dict[str, tuple[float, ...]] = {}
    counts: dict[str, int] = {}
    routes: RouteCounts = RouteCounts()
    tables: dict[str, tuple[tuple[int, str], ...]] = {}

    @classmethod
    def merged(cls, parts: Iterable[GroupStats]) -> GroupStats:
        """All parts as one; each value is copied once."""
        together = list(parts)
        counts: dict[str, int] = {}
        for part in together:
            for name, number in part.counts.items():
                counts[name] = counts.get(name, 0) + number
        return cls(
            distributions=_pooled(part.distributions for part in together),
            means=_pooled(part.means for part in together),
            medians=_pooled(part.medians for part in together),
            counts=counts,
            routes=RouteCounts.merged(part.routes for part in together),
            tables=_pooled(part.tables for part in together),
        )

    def scalars(self) -> dict[str, float]:
        """Every metric that is one number, by name. A name without values is absent."""
        found: dict[str, float] = {}
        for name, values in self.distributions.items():
            found.update(_distribution(name, values))
        found.update({name: mean(values) for name, values in self.means.items() if values})
        for name, values in self.medians.items():
            if values:
                found[name] = float(statistics.median(values))
        found.update({name: float(number) for name, number in self.counts.items()})
        found.update(self.routes.scalars())
        return found

    def histograms(self) -> dict[str, list[float]]:
        """``<name>/histogram``: the observations themselves, sorted; a tracker makes the bins."""
        return {
            f"{name}/histogram": sorted(values)
            for name, values in self.distributions.items()
            if values
        }

    def table_rows(self) -> dict[str, list[str]]:
        """Tables as rows of JSON, in the order of the batch."""
        return {
            name: [text for _, text in sorted(rows)] for name, rows in self.tables.items() if rows
        }


def _pooled(parts: Iterable[Mapping[str, tuple[ValueT, ...]]]) -> dict[str, tuple[ValueT, ...]]:
    pooled: dict[str, list[ValueT]] = {}
    for part in parts:
        for name, values in part.items():
            pooled.setdefault(name, []).extend(values)
    return {name: tuple(values) for name, values in pooled.items()}


def _distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{name}/mean": mean(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
        f"{name}/median": float(statistics.median(values)),
        f"{name}/stddev": stddev(values),
        f"{name}/p95": percentile(values, 95),
        f"{name}/p99": percentile(values, 99),
    }
