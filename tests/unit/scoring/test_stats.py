import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.scoring.stats import GroupStats, mean, percentile, stddev

FINITE = st.floats(-1e6, 1e6)


def test_a_distribution_has_all_its_statistics():
    values = tuple(float(n) for n in range(1, 101))
    scalars = GroupStats(distributions={"tokens": values}).scalars()
    assert scalars == {
        "tokens/mean": 50.5,
        "tokens/max": 100.0,
        "tokens/min": 1.0,
        "tokens/median": 50.5,
        "tokens/stddev": pytest.approx(29.011491975882016),
        "tokens/p95": 96.0,
        "tokens/p99": 100.0,
    }


def test_the_deviation_of_one_value_is_zero_and_not_nan():
    assert stddev([5.0]) == 0.0
    assert stddev([]) == 0.0
    assert stddev([2.0, 4.0]) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("values", "center", "deviation"),
    [
        ((1e308, 1e308), 1e308, 0.0),
        ((1e200, -1e200), 0.0, math.sqrt(2) * 1e200),
        ((1e308, -1e308), 0.0, math.sqrt(2) * 1e308),
    ],
)
def test_a_verifier_with_huge_numbers_does_not_end_a_run_by_its_metrics(values, center, deviation):
    scalars = GroupStats(distributions={"agent/perplexity": values}).scalars()
    assert scalars["agent/perplexity/mean"] == pytest.approx(center)
    assert scalars["agent/perplexity/stddev"] == pytest.approx(deviation)


def test_a_percentile_is_one_of_the_values():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([7.0], 95) == 7.0
    assert percentile([1.0, 2.0], 0) == 1.0


def test_a_histogram_is_the_observations():
    stats = GroupStats(distributions={"tokens": (3.0, 1.0, 1.0), "none": ()})
    assert stats.histograms() == {"tokens/histogram": [1.0, 1.0, 3.0]}


def test_a_name_without_values_is_absent():
    assert GroupStats(distributions={"a": ()}, means={"b": ()}, medians={"c": ()}).scalars() == {}


def test_groups_of_different_sizes_combine_exactly():
    # The mean of the means would be 2.5.
    small = GroupStats(means={"rate": (4.0,)}, counts={"failures": 1})
    large = GroupStats(means={"rate": (1.0, 1.0, 1.0)}, counts={"failures": 2, "other": 1})
    assert GroupStats.merged([small, large]).scalars() == {
        "rate": 1.75,
        "failures": 3.0,
        "other": 1.0,
    }


def test_tables_come_in_the_order_of_the_batch():
    late = GroupStats(tables={"a/full_result": ((2, "c"), (3, "d"))})
    early = GroupStats(tables={"a/full_result": ((1, "b"), (0, "a"))})
    assert GroupStats.merged([late, early]).table_rows() == {"a/full_result": ["a", "b", "c", "d"]}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(FINITE, max_size=5), max_size=6), st.randoms())
def test_merging_in_any_order_gives_the_same_bits(parts, random):
    stats = [
        GroupStats(distributions={"x": tuple(p)}, means={"m": tuple(p)}, medians={"h": tuple(p)})
        for p in parts
    ]
    pooled = tuple(value for part in parts for value in part)
    whole = GroupStats(distributions={"x": pooled}, means={"m": pooled}, medians={"h": pooled})
    random.shuffle(stats)
    merged = GroupStats.merged(stats)
    assert merged.scalars() == whole.scalars()
    assert merged.histograms() == whole.histograms()
    nested = GroupStats.merged([GroupStats.merged(stats[:2]), GroupStats.merged(stats[2:])])
    assert nested.scalars() == whole.scalars()


@settings(max_examples=60, deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=20))
def test_statistics_lie_between_the_extremes(values):
    scalars = GroupStats(distributions={"x": tuple(values)}).scalars()
    low, high = scalars["x/min"], scalars["x/max"]
    assert low <= scalars["x/median"] <= high
    assert low <= scalars["x/p95"] <= scalars["x/p99"] <= high
    assert mean(values) == pytest.approx(sum(values) / len(values), abs=1e-6)
