"""Every rule of the length penalty, worked by hand."""

import pytest

from gymrl.scoring.length_penalty.config import Band
from gymrl.scoring.length_penalty.rules import (
    band_multiplier,
    longest_penalty,
    pass_rate_penalty,
    profiled_penalty,
    profiled_threshold,
    relative_scaling,
    shortest_bonus,
    top_scorers,
    zmad_penalty,
)

# Top scorers


def test_every_positive_rollout_is_a_top_scorer_when_rewards_are_binary():
    assert top_scorers([1.0, 0.0, 1.0, 1.0], 0.5) == [0, 2, 3]


def test_the_top_share_is_by_score_with_ties():
    assert top_scorers([0.9, 0.5, 0.7, 0.1], 0.5) == [0, 2]
    assert top_scorers([0.9, 0.5, 0.9, 0.1], 0.25) == [0, 2]
    assert top_scorers([0.9, 0.5], 0.01) == [0]
    assert top_scorers([0.0, -1.0], 0.5) == []


# 1. Shortest bonus


def test_the_shortest_positive_rollout_gains_the_bonus():
    assert shortest_bonus([5, 3, 9, 1], [1.0, 1.0, 1.0, 0.0], 0.2, 0.5) == [0.0, 0.2, 0.0, 0.0]


def test_an_empty_length_is_not_the_shortest():
    assert shortest_bonus([0, 3, 9], [1.0, 1.0, 1.0], 0.2, 0.5) == [0.0, 0.2, 0.0]
    assert shortest_bonus([0, 0], [1.0, 1.0], 0.2, 0.5) == [0.0, 0.0]


def test_a_lone_positive_rollout_is_the_shortest():
    assert shortest_bonus([5, 3], [1.0, 0.0], 0.2, 0.5) == [0.2, 0.0]


def test_of_equally_short_rollouts_the_first_gains_the_bonus():
    assert shortest_bonus([4, 3, 3], [1.0, 1.0, 1.0], 0.2, 0.5) == [0.0, 0.2, 0.0]


def test_the_shortest_gains_nothing_when_it_is_no_top_scorer():
    assert shortest_bonus([5, 3, 4, 6], [0.9, 0.1, 0.8, 0.2], 0.2, 0.5) == [0.0] * 4


# 2. Longest top-scorer penalty


def test_the_longest_top_scorer_loses_the_penalty():
    assert longest_penalty([5, 3, 9, 20], [1.0, 1.0, 1.0, 0.0], 0.2, 0.5) == [0.0, 0.0, -0.2, 0.0]


def test_two_candidates_are_needed():
    assert longest_penalty([5, 3], [1.0, 0.0], 0.2, 0.5) == [0.0, 0.0]
    assert longest_penalty([5, 0], [1.0, 1.0], 0.2, 0.5) == [0.0, 0.0]


def test_a_longer_rollout_below_the_top_share_loses_nothing():
    assert longest_penalty([5, 3, 9, 8], [0.9, 0.8, 0.1, 0.2], 0.2, 0.5) == [-0.2, 0.0, 0.0, 0.0]


# 3. Group-relative scaling


def test_scaling_is_linear_in_length_and_sums_to_zero():
    # raw = 1, 0.5, 0; their mean is 0.5
    assert relative_scaling([10, 15, 20, 99], [1.0, 1.0, 1.0, 0.0], 0.2) == pytest.approx(
        [0.1, 0.0, -0.1, 0.0]
    )


def test_scaling_of_an_uneven_group():
    # raw = 1, 0.9, 0; their mean is 19/30
    assert relative_scaling([0, 1, 10], [1.0, 1.0, 1.0], 0.3) == pytest.approx([0.11, 0.08, -0.19])


def test_equal_lengths_and_groups_without_a_pass_are_not_scaled():
    assert relative_scaling([7, 7, 9], [1.0, 1.0, 0.0], 0.2) == [0.0, 0.0, 0.0]
    assert relative_scaling([7, 8], [0.0, 0.0], 0.2) == [0.0, 0.0]
    assert relative_scaling([7, 8], [1.0, 0.0], 0.2) == [0.0, 0.0]


# 4. zMAD outliers


def test_a_long_outlier_loses_the_penalty():
    # median 11, deviations 1 0 1 0 39: MAD 1, z = 0.6745 * 39 = 26.3
    lengths, scores = [10, 11, 12, 11, 50], [1.0] * 5
    assert zmad_penalty(lengths, scores, 3.5, 0.5) == [0.0, 0.0, 0.0, 0.0, -0.5]
    assert zmad_penalty(lengths, scores, 26.4, 0.5) == [0.0] * 5


def test_the_threshold_itself_is_no_outlier():
    # median 20, MAD 10, z of 40 is 0.6745 * 2
    assert zmad_penalty([10, 20, 40], [1.0] * 3, 1.349, 0.5) == [0.0] * 3
    assert zmad_penalty([10, 20, 40], [1.0] * 3, 1.348, 0.5) == [0.0, 0.0, -0.5]


def test_a_short_outlier_loses_nothing():
    assert zmad_penalty([1, 50, 51, 49, 50], [1.0] * 5, 1.0, 0.5)[0] == 0.0


def test_a_tight_group_has_no_outliers():
    # MAD 1 over median 100 is 0.01, under 0.015; over median 66 it is above
    assert zmad_penalty([99, 100, 101, 500], [1.0] * 4, 1.0, 0.5) == [0.0] * 4
    assert zmad_penalty([65, 66, 67, 66, 500], [1.0] * 5, 1.0, 0.5) == [0.0] * 4 + [-0.5]
    assert zmad_penalty([7, 7, 7, 90], [1.0] * 4, 1.0, 0.5) == [0.0] * 4


def test_a_threshold_of_zero_switches_the_channel_off():
    assert zmad_penalty([10, 11, 12, 11, 50], [1.0] * 5, 0.0, 0.5) == [0.0] * 5
    assert zmad_penalty([10, 11, 12, 11, 50], [1.0] * 5, -1.0, 0.5) == [0.0] * 5


def test_wrong_rollouts_are_neither_outliers_nor_in_the_median():
    assert zmad_penalty([10, 11, 12, 11, 50], [1.0] * 4 + [0.0], 3.5, 0.5) == [0.0] * 5
    assert zmad_penalty([3], [0.0], 3.5, 0.5) == [0.0]


# 5. Profiled threshold


def test_the_threshold_is_the_mean_and_population_deviations():
    # mean 5, squares 9 1 1 1 0 0 4 16: the textbook's deviation of 2
    lengths = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]
    assert profiled_threshold(lengths, 1.0, 2) == pytest.approx(7.0)
    assert profiled_threshold(lengths, -0.5, 2) == pytest.approx(4.0)
    assert profiled_threshold([6.0], 1.0, 1) == 6.0


def test_too_few_passing_profiles_give_no_threshold():
    assert profiled_threshold([5.0], 1.0, 2) is None
    assert profiled_threshold([], 1.0, 1) is None


def test_rollouts_that_reach_the_threshold_lose_the_penalty():
    assert profiled_penalty([6, 7, 8, 9], [1.0, 1.0, 1.0, 0.0], 7.0, 0.3) == [0.0, -0.3, -0.3, 0.0]
    assert profiled_penalty([6, 7], [1.0, 1.0], None, 0.3) == [0.0, 0.0]


# 6. Profile band


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 1.0), (10, 1.0), (12, 0.9), (15, 0.75), (20, 0.5), (99, 0.5)]
)
def test_the_band_falls_linearly_from_a_to_b(length, expected):
    assert band_multiplier(length, Band(a=10, b=20, f=0.5)) == pytest.approx(expected)


# 8. Pass-rate-scaled


def test_the_longest_pass_loses_weight_times_pass_rate():
    # pass rate 3/4, l_max 20
    assert pass_rate_penalty([10, 20, 5, 99], [1.0, 1.0, 1.0, 0.0], 0.4) == pytest.approx(
        [-0.15, -0.3, -0.075, 0.0]
    )


def test_an_all_wrong_group_and_empty_rollouts_lose_nothing():
    assert pass_rate_penalty([10, 20], [0.0, 0.0], 0.4) == [0.0, 0.0]
    assert pass_rate_penalty([0, 0], [1.0, 1.0], 0.4) == [0.0, 0.0]
