import json
import math
from pathlib import Path

import numpy as np
import pytest

from gymrl.errors import RewardContractError
from gymrl.scoring.components import (
    check_reward_contract,
    component_columns,
    read_reward,
    reward_components,
)
from gymrl.types import Reward
from tests.unit.scoring.samples import failure, trajectory

CAPTURES = Path(__file__).parents[2] / "data" / "captures"


def read(**fields):
    return read_reward(json.dumps(fields).encode())


def test_a_reward_of_one_part_has_no_components():
    assert read(reward=0.5) == Reward(0.5)
    assert read(reward=0.5, reward_components=None) == Reward(0.5)
    assert read(reward=0.5, reward_components={}) == Reward(0.5)


def test_a_reward_of_several_parts_keeps_them_by_name():
    assert read(reward=0.75, reward_components={"form": 0.25, "sum": 0.5}) == Reward(
        0.75, {"form": 0.25, "sum": 0.5}
    )


def test_the_answer_of_a_real_verifier_of_several_rewards_keeps_its_contract():
    exchanges = json.loads(
        (CAPTURES / "v07_multi/client_example_tool_call_multireward.json").read_text()
    )
    for exchange in exchanges:
        reward = read_reward(json.dumps(exchange["resp_body"]).encode())
        assert reward.components
        assert reward.verifier == pytest.approx(sum(reward.components.values()))


@pytest.mark.parametrize(
    "value", [None, True, "1.0", [], {}, math.nan, math.inf, -math.inf, 10**400]
)
def test_a_reward_that_is_no_finite_number_is_never_zero(value):
    with pytest.raises(RewardContractError, match="finite number"):
        reward_components({"a": value})
    if value is None or isinstance(value, str | list | dict):
        with pytest.raises(RewardContractError, match="reward is"):
            read(reward=value)


def test_a_missing_reward_is_refused():
    with pytest.raises(RewardContractError, match="reward is None"):
        read()


def test_components_that_are_no_mapping_are_refused():
    with pytest.raises(RewardContractError, match="is a list"):
        read(reward=1.0, reward_components=[1.0])


def test_a_null_component_is_refused_by_name():
    with pytest.raises(RewardContractError, match=r"reward_components\.a is None"):
        read(reward=1.0, reward_components={"a": None})


def test_the_contract_allows_for_rounding():
    check_reward_contract(Reward(0.3, {"a": 0.1, "b": 0.2}))
    check_reward_contract(Reward(1.000009, {"a": 1.0}))
    check_reward_contract(Reward(0.0, {"a": 0.5, "b": -0.5000009}))


def test_a_reward_that_is_not_the_sum_is_surfaced_with_its_row():
    with pytest.raises(RewardContractError, match=r"row 4, agent math: .* is 1\.0 .* sum to 0\.5"):
        check_reward_contract(Reward(1.0, {"a": 0.25, "b": 0.25}), row=4, agent="math")
    with pytest.raises(ValueError, match="sum to"):
        check_reward_contract(Reward(1.00003, {"a": 1.0}))


def test_nan_never_passes_the_contract():
    for reward in (
        Reward(math.nan),
        Reward(math.nan, {"a": math.nan}),
        Reward(1.0, {"a": math.inf}),
    ):
        with pytest.raises(RewardContractError, match="must be finite"):
            check_reward_contract(reward)


def test_a_penalty_does_not_make_the_verifier_look_wrong():
    check_reward_contract(Reward(1.0, {"a": 1.0}).adjusted("empty_final_answer", 0.0))


def test_columns_are_the_sorted_union_filled_with_zero():
    columns = component_columns(
        [
            trajectory(0.5, components={"b": 0.5}),
            trajectory(1.0),
            failure(),
            trajectory(3.0, components={"a": 1.0, "b": 2.0}),
        ]
    )
    assert list(columns) == ["reward/a", "reward/b"]
    assert columns["reward/a"].dtype == np.float32
    assert columns["reward/a"].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert columns["reward/b"].tolist() == [0.5, 0.0, 0.0, 2.0]


def test_a_batch_without_components_has_no_columns():
    assert component_columns([trajectory(1.0), failure()]) == {}
