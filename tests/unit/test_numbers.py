"""One rule for what a reward is, on every road that reads one."""

import json
import math

import msgspec
import pytest

from gymrl import numbers
from gymrl.compat.nemo_rl import (
    apply_reward_penalties,
    extract_reward_components,
    validate_reward_components_match_scalar,
)
from gymrl.errors import RewardContractError
from gymrl.gym import rewards as gym_rewards
from gymrl.gym.schema import RunAnswer
from gymrl.scoring import components as scoring_rewards
from gymrl.types import Reward


@pytest.mark.parametrize("value", [0, 1, -3, 0.5, 10**38, -3.4028234663852886e38])
def test_a_finite_number_is_a_reward(value):
    assert numbers.reward_number(value) == float(value)


@pytest.mark.parametrize("value", [None, "1", [], {}, math.nan, -math.inf, 10**400, True, False])
def test_what_is_no_finite_number_is_no_reward_and_no_zero(value):
    assert numbers.finite_float(value) is None
    with pytest.raises(
        RewardContractError, match=r"row 3: reward is .*; a finite number is needed"
    ):
        numbers.reward_number(value, "row 3: reward")


@pytest.mark.parametrize("value", [10**39, -1e300, 3.4028236e38])
def test_a_reward_that_a_batch_would_make_infinite_is_none(value):
    with pytest.raises(RewardContractError, match=r"reward is .*; at most 3.4e\+38 fits"):
        numbers.reward_number(value)


def test_a_sum_beyond_floats_is_infinite_and_raises_nothing():
    assert numbers.exact_sum([0.1] * 10) == 1.0
    assert numbers.exact_sum([1e308, 1e308]) == math.inf
    assert numbers.exact_sum([-1e308, -1e308, 1.0]) == -math.inf
    assert numbers.exact_sum([1e308, 1e308, -1e308]) == pytest.approx(1e308)
    assert not Reward(1.0, {"a": 1e308, "b": 1e308}).is_sum_of_components()


def of_gym(body):
    return gym_rewards.read_reward(msgspec.json.decode(body, type=RunAnswer))


ROADS = pytest.mark.parametrize("read", [of_gym, scoring_rewards.read_reward])


@ROADS
@pytest.mark.parametrize("word", [True, False])
def test_json_true_is_no_reward_on_any_road(read, word):
    """It was 1 where rewards are scored, and refused where Gym's answers are read."""
    with pytest.raises(RewardContractError, match=r"reward is (True|False).*give 1\.0 or 0\.0"):
        read(json.dumps({"reward": word}).encode())


@ROADS
def test_json_true_is_no_part_of_a_reward_on_any_road(read):
    body = {"reward": 1.0, "reward_components": {"right": True, "short": 0.0}}
    with pytest.raises(RewardContractError, match=r"reward_components\.right is True"):
        read(json.dumps(body).encode())


@ROADS
def test_both_roads_read_the_same_reward(read):
    body = {"reward": 3, "reward_components": {"right": 2, "short": 1.0}}
    reward = read(json.dumps(body).encode())
    assert (reward.verifier, reward.components) == (3.0, {"right": 2.0, "short": 1.0})


def test_a_true_under_nemo_rls_names_is_refused_with_its_place():
    with pytest.raises(RewardContractError, match="result 1: reward is True"):
        validate_reward_components_match_scalar(
            [
                {"reward": 1.0, "reward_components": {"a": 1.0}},
                {"reward": True, "reward_components": {"a": 1.0}},
            ]
        )
    with pytest.raises(RewardContractError, match=r"result 0: reward_components\.a is True"):
        validate_reward_components_match_scalar([{"reward": 1, "reward_components": {"a": True}}])
    with pytest.raises(RewardContractError, match="result 1: reward is True"):
        apply_reward_penalties(
            [{"full_result": {"reward": 1.0}}, {"full_result": {"reward": True}}],
            {"penalize_empty_final_answer": True},
        )
    with pytest.raises(RewardContractError, match="a is False"):
        extract_reward_components({"reward_components": {"a": False}})
