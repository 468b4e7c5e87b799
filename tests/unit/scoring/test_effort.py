import pytest

from gymrl.errors import ConfigError
from gymrl.scoring.effort import (
    EffortConfig,
    effort_stats,
    length_reward,
    shape_effort,
    shaped_reward,
    terminal_length,
)
from tests.unit.scoring.samples import ledger, trajectory

BRIEF = EffortConfig(low_weight=1.0, low_penalty=2.0, low_ub=10, low_string="briefly")


def of_length(length, reward=1.0):
    return trajectory(reward, pairs=(((1, 2), (3,)), ((4,), (5,) * length)))


def test_shaping_is_off_without_a_weight_or_a_string():
    assert not EffortConfig().active
    assert not EffortConfig(low_weight=1.0).active
    assert not EffortConfig(low_weight=0.0, low_string="x").active
    assert not EffortConfig(low_weight=-1.0, low_string="x").active
    before = of_length(4)
    assert shape_effort(before, "answer briefly", EffortConfig(low_weight=1.0)).trajectory is before


@pytest.mark.parametrize("bound", [0, -1])
def test_a_bound_of_zero_is_refused_when_shaping_is_on(bound):
    with pytest.raises(ConfigError, match="low_ub"):
        EffortConfig(low_weight=1.0, low_string="x", low_ub=bound)
    EffortConfig(low_ub=bound)


def test_unknown_keys_and_numbers_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="low_weigth"):
        EffortConfig.from_dict({"low_weigth": 1.0})
    with pytest.raises(ConfigError, match="low_weight"):
        EffortConfig(low_weight=float("nan"))
    with pytest.raises(ConfigError, match="low_penalty"):
        EffortConfig(low_weight=1.0, low_string="x", low_penalty=-1.0)


@pytest.mark.parametrize(
    ("weight", "length", "expected"),
    [(1.0, 4, 0.6), (1.0, 10, 0.0), (1.0, 15, -0.5), (3.0, 1, 1.0), (0.5, 0, 0.5)],
)
def test_the_length_reward_falls_with_length_and_is_at_most_one(weight, length, expected):
    config = EffortConfig(low_weight=weight, low_string="x", low_ub=10)
    assert length_reward(length, config) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reward", "term", "expected"),
    [(1.0, 0.6, 1.6), (0.0, 0.6, 0.0), (1.0, -0.5, 0.0), (0.0, -0.5, -1.0), (-1.0, 0.5, -1.5)],
)
def test_a_short_answer_multiplies_and_a_long_one_subtracts(reward, term, expected):
    assert shaped_reward(reward, term, BRIEF) == pytest.approx(expected)


def test_a_low_effort_answer_is_shaped_by_its_last_message():
    outcome = shape_effort(of_length(4), "answer briefly", BRIEF)
    assert outcome.length == 4
    assert outcome.length_reward == pytest.approx(0.6)
    assert ledger(outcome.trajectory) == [("effort", pytest.approx(1.6))]
    assert outcome.trajectory.reward.verifier == 1.0


def test_another_prompt_leaves_the_reward_alone():
    before = of_length(4)
    outcome = shape_effort(before, "take your time", BRIEF)
    assert outcome.trajectory is before
    assert (outcome.is_low, outcome.length) == (False, 4)


def test_an_answer_without_tokens_has_no_length_to_reward():
    assert terminal_length(of_length(0)) is None
    assert terminal_length(trajectory(pairs=())) is None
    assert terminal_length(trajectory(placeholder=True)) is None
    before = of_length(0)
    assert shape_effort(before, "answer briefly", BRIEF).trajectory is before


def test_metrics_are_over_low_and_other_prompts_apart():
    outcomes = [
        shape_effort(of_length(4), "briefly", BRIEF),
        shape_effort(of_length(8), "briefly", BRIEF),
        shape_effort(of_length(0), "briefly", BRIEF),
        shape_effort(of_length(20), "at length", BRIEF),
        shape_effort(of_length(21), "at length", BRIEF),
        shape_effort(of_length(31), "at length", BRIEF),
    ]
    assert effort_stats(outcomes).scalars() == {
        "mean_length_reward_low": pytest.approx(0.4),
        "mean_reward_low": pytest.approx(1.4),
        "mean_length_low": 6.0,
        "median_length_low": 6.0,
        "mean_length_high": 24.0,
        "median_length_high": 21.0,
    }


def test_a_metric_with_nothing_to_report_is_absent():
    only_high = effort_stats([shape_effort(of_length(4), "at length", BRIEF)])
    assert only_high.scalars() == {"mean_length_high": 4.0, "median_length_high": 4.0}
    assert effort_stats([]).scalars() == {}
