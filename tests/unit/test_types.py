import msgspec
import numpy as np
import pytest

from gymrl.types import Adjustment, Failure, FailureKind, Reward, RolloutGroup, Trajectory, Turn


def trajectory(**changes):
    values = {
        "agent": "a",
        "token_ids": np.arange(6, dtype=np.int32),
        "logprobs": np.zeros(6, dtype=np.float32),
        "turns": (
            Turn(start=0, generation_start=2, end=3),
            Turn(start=3, generation_start=4, end=6),
        ),
        "reward": Reward(1.0),
    }
    return Trajectory(**(values | changes))


def test_an_adjusted_reward_keeps_the_verifiers_value():
    reward = Reward(1.0, {"format": 0.25, "answer": 0.75})

    adjusted = reward.adjusted("effort", 1.5).adjusted("empty_final_answer", 0.0)

    assert reward.total == 1.0
    assert adjusted.verifier == 1.0
    assert adjusted.total == 0.0
    assert adjusted.adjustments == (
        Adjustment("effort", 1.5),
        Adjustment("empty_final_answer", 0.0),
    )
    assert adjusted.components == {"format": 0.25, "answer": 0.75}


def test_the_token_mask_is_true_on_sampled_tokens_only():
    assert trajectory().token_mask().tolist() == [False, False, True, False, True, True]
    assert trajectory().num_generated == 3
    assert trajectory().num_tokens == 6


def test_a_record_is_frozen():
    with pytest.raises(AttributeError):
        trajectory().mask_sample = True


def test_a_group_tells_trajectories_from_failures():
    failure = Failure(kind=FailureKind.INFRA, error="GymTransportError", message="503")
    group = RolloutGroup(index=0, task_index=0, rows=(), samples=(trajectory(), failure))

    assert len(group.trajectories) == 1
    assert group.failures == (failure,)


def test_the_kind_of_a_failure_travels_as_a_word():
    failure = Failure(kind=FailureKind.DATA, error="GymSchemaError", message="no reward")

    assert msgspec.json.decode(msgspec.json.encode(failure))["kind"] == "data"
