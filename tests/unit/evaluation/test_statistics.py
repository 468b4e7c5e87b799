import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.evaluation.statistics import (
    clustered_mean,
    mean_over_tasks,
    pass_at_k,
    pass_hat_k,
    percentile,
    powers_up_to,
    reward_histogram,
    sign_test,
    student_quantile,
)


@pytest.mark.parametrize(
    ("attempts", "passed", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (4, 1, 4, 1.0),
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (10, 0, 5, 0.0),
        (3, 3, 1, 1.0),
    ],
)
def test_pass_at_k_is_the_unbiased_estimate(attempts, passed, k, expected):
    assert pass_at_k(attempts, passed, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("attempts", "passed", "k", "expected"),
    [
        (4, 2, 1, 0.5),
        (4, 2, 2, 1 / 6),  # C(2,2)/C(4,2)
        (4, 3, 2, 0.5),  # C(3,2)/C(4,2) = 3/6
        (4, 1, 2, 0.0),
        (4, 4, 4, 1.0),
    ],
)
def test_pass_hat_k_asks_that_all_attempts_pass(attempts, passed, k, expected):
    assert pass_hat_k(attempts, passed, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("attempts", "passed", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (0, 0, 1)])
def test_counts_that_do_not_fit_are_refused(attempts, passed, k):
    with pytest.raises(ValueError, match="k is at least 1"):
        pass_at_k(attempts, passed, k)
    with pytest.raises(ValueError, match="k is at least 1"):
        pass_hat_k(attempts, passed, k)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_over_all_choices_of_k_attempts(outcomes, data):
    import itertools

    k = data.draw(st.integers(1, len(outcomes)))
    choices = list(itertools.combinations(outcomes, k))
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(
        sum(any(choice) for choice in choices) / len(choices)
    )
    assert pass_hat_k(len(outcomes), sum(outcomes), k) == pytest.approx(
        sum(all(choice) for choice in choices) / len(choices)
    )


@pytest.mark.parametrize(
    ("degrees", "expected"),
    # Two-sided 95 %, from a printed table.
    [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)],
)
def test_quantiles_of_students_t_are_those_of_the_table(degrees, expected):
    assert student_quantile(0.975, degrees) == pytest.approx(expected, abs=5e-4)
    assert student_quantile(0.025, degrees) == pytest.approx(-expected, abs=5e-4)


def test_the_median_of_students_t_is_zero_and_cauchys_quartile_is_one():
    assert student_quantile(0.5, 3) == pytest.approx(0.0, abs=1e-12)
    assert student_quantile(0.75, 1) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 1), (1.0, 1), (0.5, 0)])
def test_a_quantile_out_of_range_is_refused(probability, degrees):
    with pytest.raises(ValueError, match="out of range"):
        student_quantile(probability, degrees)


def test_one_value_a_task_gives_the_textbook_interval():
    # 1, 2, 3, 4, 5: mean 3, variance 10/4, standard error sqrt(2.5 / 5), t(4) = 2.776445.
    found = mean_over_tasks([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.standard_error == pytest.approx(math.sqrt(0.5))
    assert found.low == pytest.approx(3 - 2.776445 * math.sqrt(0.5), abs=1e-5)
    assert found.high == pytest.approx(3 + 2.776445 * math.sqrt(0.5), abs=1e-5)
    assert (found.tasks, found.values) == (5, 5)


def test_repeats_of_a_task_do_not_make_the_interval_narrower():
    once = clustered_mean([[0.0], [1.0], [1.0]])
    repeated = clustered_mean([[0.0] * 50, [1.0] * 50, [1.0] * 50])
    assert repeated.mean == pytest.approx(once.mean)
    assert repeated.low == pytest.approx(once.low)
    assert repeated.high == pytest.approx(once.high)
    assert (once.values, repeated.values) == (3, 150)


def test_tasks_of_different_sizes_weigh_by_their_rows():
    # Tasks [1, 0, 0] and [1]: mean 1/2; residual sums -1/2 and 1/2;
    # standard error sqrt(2/1 * (1/4 + 1/4)) / 4 = 1/4; t(1) = 12.7062.
    found = clustered_mean([[1.0, 0.0, 0.0], [1.0]])
    assert found.mean == 0.5
    assert found.standard_error == pytest.approx(0.25)
    assert found.high == pytest.approx(0.5 + 12.7062 * 0.25, abs=1e-3)


def test_tasks_without_a_value_are_left_out():
    assert clustered_mean([[], [1.0], [], [0.0]]).tasks == 2


@pytest.mark.parametrize("tasks", [[[1.0, 0.0]], [[1.0], [1.0], [1.0]], [[0.1, 0.2], [0.2, 0.1]]])
def test_no_interval_is_claimed_where_there_is_no_spread_over_tasks(tasks):
    found = clustered_mean(tasks)
    assert (found.low, found.high) == (None, None)


def test_a_mean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        clustered_mean([[], []])


@pytest.mark.parametrize(
    ("better", "worse", "expected"),
    [
        (0, 0, 1.0),
        (5, 0, 0.0625),  # 2 * 1/32
        (4, 1, 0.375),  # 2 * (1 + 5)/32
        (3, 3, 1.0),
        (9, 1, 2 * 11 / 1024),
    ],
)
def test_the_sign_test_is_exact(better, worse, expected):
    assert sign_test(better, worse) == pytest.approx(expected)
    assert sign_test(worse, better) == pytest.approx(expected)


def test_the_sign_test_takes_many_tasks():
    assert sign_test(1500, 1500) == 1.0
    assert 0 <= sign_test(3000, 100) < 1e-100


def test_the_reported_ks_are_powers_of_two_and_the_number_of_repeats():
    assert powers_up_to(1) == (1,)
    assert powers_up_to(6) == (1, 2, 4, 6)
    assert powers_up_to(8) == (1, 2, 4, 8)
    assert powers_up_to(0) == ()


def test_percentiles_lie_between_the_nearest_values():
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile([10], 0.95) == 10
    assert percentile([0, 10], 0.95) == pytest.approx(9.5)
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.5)


def test_a_histogram_reaches_from_0_to_1_and_its_last_bin_has_the_end():
    found = reward_histogram([0.0, 0.25, 0.26, 1.0, 1.0], bins=4)
    assert (found.low, found.high, found.counts) == (0.0, 1.0, (1, 2, 0, 2))


def test_a_histogram_is_as_wide_as_the_rewards_are():
    found = reward_histogram([-1.0, 0.0, 3.0], bins=4)
    assert (found.low, found.high, found.counts) == (-1.0, 3.0, (1, 1, 0, 1))


def test_there_is_no_histogram_of_nothing_nor_without_bins():
    assert reward_histogram([]) is None
    with pytest.raises(ValueError, match="bins=0"):
        reward_histogram([1.0], bins=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.integers(1, 30))
def test_a_histogram_counts_every_reward_once(rewards, bins):
    found = reward_histogram(rewards, bins)
    assert (len(found.counts), sum(found.counts)) == (bins, len(rewards))


def test_rewards_beyond_what_a_float_can_square_have_a_mean_and_an_interval():
    estimate = clustered_mean([[1e200], [0.0]])
    assert (estimate.mean, estimate.standard_error) == pytest.approx((5e199, 5e199))
    assert estimate.low < 0 < estimate.high
    assert clustered_mean([[1e308, 1e308], [1e308]]).mean == 1e308
    # The ends of this interval are no numbers that JSON could carry.
    assert clustered_mean([[1.7e308], [-1.7e308]]).low is None
    assert reward_histogram([-1e308, 1e308], bins=2).counts == (1, 1)


def test_residuals_of_a_task_cancel_exactly():
    # The second task's rows are 1e160 away from the mean, and 2 below it together.
    estimate = clustered_mean([[3.0], [1e160, -1e160]])
    assert estimate.standard_error == pytest.approx(math.sqrt(2 * (2**2 + 2**2)) / 3)
