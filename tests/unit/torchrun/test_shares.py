"""Whole groups shared out over ranks."""

import hashlib

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from gymrl.torchrun.shares import (
    Share,
    balance,
    decode_share,
    encode_share,
    global_metrics,
    num_tokens,
)
from gymrl.types import Failure, FailureKind, Reward, RolloutGroup, Row, Trajectory, Turn


def row(index):
    return Row(
        index=index,
        task_index=0,
        rollout_index=index,
        route="r",
        rollout_id=f"x{index}",
        body=b"{}",
    )


def trajectory(reward, length=4, reason=None, mask=False):
    return Trajectory(
        agent="a",
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.linspace(-1, 0, length, dtype=np.float32),
        turns=(Turn(start=0, generation_start=1, end=length),),
        reward=Reward(reward),
        incomplete_reason=reason,
        mask_sample=mask,
    )


def group(*samples, index=0, timings=None):
    return RolloutGroup(
        index=index,
        task_index=index,
        rows=tuple(row(i) for i in range(len(samples))),
        samples=samples,
        timings=timings,
    )


FAILED = Failure(kind=FailureKind.DATA, error="NoGenerationError", message="nothing")


def test_the_longest_groups_go_to_the_lightest_ranks():
    assert balance([8, 7, 6, 5, 4], 2) == [[0, 3, 4], [1, 2]]


def test_fewer_groups_than_ranks_leave_ranks_without():
    assert balance([3, 3], 4) == [[0], [1], [], []]


def test_no_rank_is_empty_while_another_has_two():
    assert all(balance([100, 1, 1], 3))


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.integers(1, 8),
)
@settings(deadline=None, max_examples=60)
def test_each_group_goes_to_one_rank_and_loads_are_near_the_best(weights, bins):
    shares = balance(weights, bins)
    assert sorted(i for share in shares for i in share) == list(range(len(weights)))
    heaviest = max(sum(weights[i] for i in share) for share in shares)
    assert heaviest <= sum(weights) / bins + max(weights)


def test_groups_survive_the_way_through_bytes():
    groups = [group(trajectory(1.0), trajectory(0.0, 7), FAILED), group(trajectory(0.5), index=1)]
    back, asked = decode_share(encode_share(groups, [0, 2]))
    assert asked == [0, 2]
    assert [g.index for g in back] == [0, 1]
    assert isinstance(back[0].samples[2], Failure)
    np.testing.assert_array_equal(back[0].samples[1].token_ids, groups[0].samples[1].token_ids)
    np.testing.assert_array_equal(back[0].samples[1].logprobs, groups[0].samples[1].logprobs)


def test_an_image_is_in_a_share_once_and_comes_back_to_every_attempt():
    image = b"\x89PNG" * 10_000
    digest = hashlib.sha256(image).hexdigest()
    shown = msgspec.structs.replace(trajectory(1.0), media={digest: image})
    data = encode_share([group(shown, shown, shown)], [0])
    assert len(image) < len(data) < 2 * len(image)
    ((back,), _) = decode_share(data)
    assert [sample.media for sample in back.trajectories] == [{digest: image}] * 3


def test_a_share_of_no_groups_travels_too():
    assert decode_share(encode_share([], [])) == ([], [])


def test_a_failed_row_is_counted_and_in_no_mean():
    metrics = global_metrics([group(trajectory(1.0), FAILED)], None)
    assert metrics["reward_mean"] == 1.0
    assert metrics["failed_samples"] == 1.0
    assert metrics["samples"] == 1.0


def test_a_step_of_failures_alone_has_no_mean_reward():
    assert "reward_mean" not in global_metrics([group(FAILED)], None)


def test_truncated_and_masked_samples_are_counted():
    metrics = global_metrics(
        [group(trajectory(1.0, reason="max_output_tokens"), trajectory(0.0, 9, mask=True))], 9
    )
    assert metrics["truncation_rate"] == 1.0
    assert metrics["masked_samples"] == 1.0


def test_a_group_of_equal_rewards_is_degenerate():
    groups = [group(trajectory(1.0), trajectory(1.0)), group(trajectory(1.0), trajectory(0.0))]
    assert global_metrics(groups, None)["degenerate_groups"] == 1.0


def test_timings_of_the_rollout_are_among_the_metrics():
    metrics = global_metrics([group(trajectory(1.0), timings={"timing/rollout/total": 2.0})], 9)
    assert metrics["timing/rollout/total"] == 2.0


def test_a_group_without_trajectories_still_weighs_something():
    assert num_tokens(group(FAILED)) == 1


def test_a_share_becomes_tensors():
    share = Share(
        groups=(group(trajectory(1.0), trajectory(0.0, 6)),), metrics={}, num_groups=1, version=0
    )
    batch = share.batch(pad_token_id=0)
    assert batch.token_ids.shape == (2, 6)
    assert batch.final_batch["total_reward"].tolist() == [1.0, 0.0]


def test_a_torn_share_is_refused():
    data = encode_share([group(trajectory(1.0))], [0])
    with pytest.raises(Exception, match=r"leaves the\s+region|decode"):
        decode_share(data[:-8])
