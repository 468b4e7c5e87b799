"""Ages of tokens, from the versions of the weights that sampled them."""

import numpy as np

from gymrl.torchrun import Share
from gymrl.torchrun.staleness import oldest, staleness_metrics, token_ages
from gymrl.types import (
    Failure,
    FailureKind,
    Reward,
    RolloutGroup,
    Row,
    Trajectory,
    Turn,
    WeightVersionSpan,
)


def trajectory(*spans, length=6):
    """Two prompt tokens, then sampled ones; `spans` are (version, start, end)."""
    return Trajectory(
        agent="a",
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        turns=(Turn(start=0, generation_start=2, end=length),),
        reward=Reward(1.0),
        weight_versions=tuple(WeightVersionSpan(*span) for span in spans),
    )


def group(*samples):
    rows = tuple(
        Row(index=i, task_index=0, rollout_index=i, route="r", rollout_id=f"x{i}", body=b"{}")
        for i in range(len(samples))
    )
    return RolloutGroup(index=0, task_index=0, rows=rows, samples=samples)


INTERRUPTED = trajectory(("3", 2, 4), ("4", 4, 6))
"""A generation that an update interrupted after two tokens."""

UNTOLD = trajectory()
FAILED = Failure(kind=FailureKind.DATA, error="NoGenerationError", message="nothing")


def test_a_generation_that_an_update_interrupted_has_tokens_of_two_ages():
    assert token_ages(INTERRUPTED, 5, asked=3).tolist() == [0, 0, 2, 2, 1, 1]


def test_a_token_that_younger_weights_sampled_than_when_it_was_asked_for_is_young():
    assert token_ages(trajectory(("5", 2, 6)), 5, asked=3).tolist() == [0] * 6


def test_a_token_of_which_nobody_said_its_version_counts_from_the_request():
    assert token_ages(UNTOLD, 5, asked=3).tolist() == [0, 0, 2, 2, 2, 2]


def test_no_age_is_negative():
    assert token_ages(trajectory(("9", 2, 6)), 5, asked=5).tolist() == [0] * 6


def test_a_group_is_as_old_as_its_oldest_token():
    assert oldest(group(trajectory(("5", 2, 6)), INTERRUPTED), 5, asked=1) == 2
    assert oldest(group(FAILED), 5, asked=1) == 4


def test_the_metrics_are_over_tokens():
    metrics = staleness_metrics([group(INTERRUPTED, FAILED), group(UNTOLD)], [3, 5], 5)
    assert metrics == {
        "staleness_mean": 6 / 8,
        "staleness_max": 2.0,
        "stale_tokens_rate": 0.5,
        "versioned_tokens_rate": 0.5,
    }


def test_a_step_without_a_token_is_fresh():
    assert staleness_metrics([group(FAILED)], [0], 3)["staleness_max"] == 0.0


def test_a_share_knows_the_age_of_each_token_of_its_batch():
    share = Share(
        groups=(group(INTERRUPTED, FAILED), group(UNTOLD)),
        metrics={},
        num_groups=2,
        version=5,
        asked=(3, 4),
    )
    ages = share.token_ages(share.batch(pad_token_id=0))
    assert ages.tolist() == [[0, 0, 2, 2, 1, 1], [0] * 6, [0, 0, 1, 1, 1, 1]]
    assert share.staleness == (2, 1)
