import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import RewardContractError, RowValueError
from gymrl.tensors import message_log, to_batch
from gymrl.types import (
    Adjustment,
    Failure,
    FailureKind,
    Reward,
    RolloutGroup,
    Row,
    Trajectory,
    Turn,
    WeightVersionSpan,
)

PAD = 99


def trajectory(*turns, reward=Reward(1.0), agent="math_agent", **fields):  # noqa: B008  # frozen
    """A trajectory of turns given as (number of prompt tokens, number of sampled tokens)."""
    spans, end = [], 0
    for prompt, sampled in turns:
        spans.append(
            Turn(
                start=end,
                generation_start=end + prompt,
                end=end + prompt + sampled,
                prompt_text=f"p{len(spans)}",
                generation_text=f"g{len(spans)}",
            )
        )
        end += prompt + sampled
    made = Trajectory(
        agent=agent,
        token_ids=np.arange(1, end + 1, dtype=np.int32),
        logprobs=np.zeros(end, dtype=np.float32),
        turns=tuple(spans),
        reward=reward,
        **fields,
    )
    made.logprobs[made.token_mask()] = -0.25
    return made


def failure():
    return Failure(kind=FailureKind.INFRA, error="RolloutTimeout", message="too slow")


def group(*samples, index=0):
    rows = tuple(
        Row(
            index=index * 10 + place,
            task_index=index,
            rollout_index=place,
            route="math",
            rollout_id=f"r{index}-{place}",
            body=b"{}",
        )
        for place in range(len(samples))
    )
    return RolloutGroup(index=index, task_index=index, rows=rows, samples=samples)


def batch_of(*samples, **options):
    return to_batch([group(*samples)], pad_token_id=PAD, **options)


def test_samples_are_padded_on_the_right():
    batch = batch_of(trajectory((2, 1)), trajectory((1, 2), (1, 1)))
    assert batch.token_ids.tolist() == [[1, 2, 3, PAD, PAD], [1, 2, 3, 4, 5]]
    assert batch.token_mask.tolist() == [
        [False, False, True, False, False],
        [False, True, True, False, True],
    ]
    assert batch.generation_logprobs.tolist() == [
        [0.0, 0.0, -0.25, 0.0, 0.0],
        [0.0, -0.25, -0.25, 0.0, -0.25],
    ]
    assert batch.lengths.tolist() == [3, 5]
    assert batch.token_ids.dtype == torch.int64
    assert batch.generation_logprobs.dtype == torch.float32


def test_the_width_can_be_rounded_up():
    batch = batch_of(trajectory((2, 1)), pad_to_multiple=8)
    assert batch.token_ids.shape == (1, 8)


def test_input_ids_are_the_padded_first_prompts_and_length_their_size():
    batch = batch_of(trajectory((2, 3)), trajectory((4, 1), (5, 1)))
    assert batch.input_ids.tolist() == [[1, 2, PAD, PAD], [1, 2, 3, 4]]
    assert batch.final_batch["length"].tolist() == [2, 4]


def test_the_message_log_alternates_and_carries_the_sampled_ids():
    log = message_log(trajectory((2, 1), (0, 2)))
    assert [message["role"] for message in log] == ["user", "assistant", "user", "assistant"]
    assert [message["token_ids"].tolist() for message in log] == [[1, 2], [3], [], [4, 5]]
    assert [message["token_loss_mask"].tolist() for message in log] == [
        [False, False],
        [True],
        [],
        [True, True],
    ]
    assert [message["content"] for message in log] == ["p0", "g0", "p1", "g1"]
    assert log[3]["generation_logprobs"].tolist() == [-0.25, -0.25]
    assert "generation_logprobs" not in log[0]


def test_text_that_the_worker_did_not_keep_is_empty():
    made = trajectory((1, 1))
    bare = Trajectory(
        agent="a",
        token_ids=made.token_ids,
        logprobs=made.logprobs,
        turns=(Turn(start=0, generation_start=1, end=2, has_malformed_thinking=True),),
        reward=Reward(0.0),
    )
    log = message_log(bare)
    assert [message["content"] for message in log] == ["", ""]
    assert log[1]["has_malformed_thinking"] is True
    assert log[1]["is_invalid_tool_call"] is False


def test_the_columns_of_a_plain_batch():
    batch = batch_of(trajectory((1, 1), reward=Reward(0.5)))
    assert set(batch.final_batch) == {
        "agent_ref",
        "message_log",
        "length",
        "loss_multiplier",
        "total_reward",
        "truncated",
        "mask_sample",
        "reward_valid",
    }
    assert batch.final_batch["agent_ref"] == [
        {"type": "responses_api_agents", "name": "math_agent"}
    ]
    assert batch.final_batch["total_reward"].tolist() == [0.5]
    assert batch.final_batch["loss_multiplier"].tolist() == [1.0]


def test_a_failed_row_trains_nothing_and_its_reward_is_no_zero():
    batch = batch_of(trajectory((2, 2), reward=Reward(1.0)), failure())
    assert batch.token_ids.tolist()[1] == [PAD, PAD, PAD, PAD]
    assert batch.lengths.tolist() == [4, 1]
    assert not batch.token_mask[1].any()
    assert batch.final_batch["loss_multiplier"].tolist() == [1.0, 0.0]
    assert batch.final_batch["mask_sample"].tolist() == [False, True]
    assert batch.reward_valid.tolist() == [True, False]
    rewards = batch.final_batch["total_reward"]
    assert rewards[batch.reward_valid].mean() == 1.0
    assert torch.isfinite(rewards).all()
    assert batch.final_batch["agent_ref"][1]["name"] == "math"
    assert [m["role"] for m in batch.final_batch["message_log"][1]] == ["user", "assistant"]


def test_a_failed_row_trains_nothing_also_when_flags_are_set_aside():
    batch = batch_of(trajectory((1, 1), mask_sample=True), failure(), mask_flagged_samples=False)
    assert "mask_sample" not in batch.final_batch
    assert batch.final_batch["loss_multiplier"].tolist() == [1.0, 0.0]


def test_a_group_of_failures_alone_is_still_a_batch():
    batch = batch_of(failure(), failure())
    assert batch.token_ids.tolist() == [[PAD], [PAD]]
    assert not batch.reward_valid.any()
    assert batch.packed().max_seqlen == 1


def test_a_flagged_sample_is_masked_but_its_reward_counts():
    batch = batch_of(trajectory((1, 1), mask_sample=True))
    assert batch.final_batch["mask_sample"].tolist() == [True]
    assert batch.reward_valid.tolist() == [True]


@pytest.mark.parametrize(
    ("fields", "limit", "truncated"),
    [
        ({}, None, False),
        ({}, 4, False),
        ({}, 3, True),
        ({}, 2, True),
        ({"incomplete_reason": "max_output_tokens"}, 100, True),
        ({"incomplete_reason": "length"}, None, True),
        ({"incomplete_reason": "content_filter"}, 100, False),
        ({"incomplete_reason": "what?"}, None, False),
    ],
)
def test_a_sample_is_truncated_at_the_limit_or_for_a_length_reason(fields, limit, truncated):
    batch = batch_of(trajectory((2, 1), **fields), max_total_tokens=limit)
    assert batch.final_batch["truncated"].tolist() == [truncated]


def test_reward_components_are_the_union_over_the_batch_sorted():
    batch = batch_of(
        trajectory((1, 1), reward=Reward(1.0, {"zeta": 0.25, "alpha": 0.75})),
        trajectory((1, 1), reward=Reward(0.5, {"mid": 0.5})),
        failure(),
    )
    names = [name for name in batch.final_batch if name.startswith("reward/")]
    assert names == ["reward/alpha", "reward/mid", "reward/zeta"]
    assert batch.final_batch["reward/alpha"].tolist() == [0.75, 0.0, 0.0]
    assert batch.final_batch["reward/mid"].tolist() == [0.0, 0.5, 0.0]


def test_env_reward_is_the_reward_before_the_length_penalty():
    shaped = Reward(
        1.0, None, (Adjustment("effort", 1.5), Adjustment("length_penalty/total", 0.75))
    )
    batch = batch_of(
        trajectory((1, 1), reward=shaped), trajectory((1, 1), reward=Reward(1.0)), failure()
    )
    assert batch.final_batch["total_reward"].tolist() == [0.75, 1.0, 0.0]
    assert batch.final_batch["env_reward"].tolist() == [1.5, 1.0, 0.0]


def test_env_reward_is_there_on_demand_where_no_length_rule_spoke():
    batch = batch_of(trajectory((1, 1), reward=Reward(0.5)), with_env_reward=True)
    assert batch.final_batch["env_reward"].tolist() == [0.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_never_reaches_a_batch(bad):
    with pytest.raises(RewardContractError, match="row 1"):
        batch_of(trajectory((1, 1)), trajectory((1, 1), reward=Reward(bad)))


def test_a_batch_needs_a_group():
    with pytest.raises(RowValueError, match="at least one group"):
        to_batch([], pad_token_id=0)


def test_samples_know_their_group():
    batch = to_batch(
        [group(trajectory((1, 1)), failure(), index=4), group(trajectory((1, 1)), index=2)],
        pad_token_id=0,
    )
    assert batch.group_index.tolist() == [0, 0, 1]


def test_arrays_that_may_not_be_written_to_are_copied():
    made = trajectory((1, 2))
    made.logprobs.flags.writeable = False
    made.token_ids.flags.writeable = False
    batch = batch_of(made)
    batch.token_ids[0, 0] = 7
    log = batch.final_batch["message_log"][0]
    log[1]["generation_logprobs"][0] = -9.0
    assert made.logprobs.tolist() == [0.0, -0.25, -0.25]
    assert made.token_ids.tolist() == [1, 2, 3]


turns = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4).map(
    lambda later: [(2, 1), *later]
)
samples = st.one_of(turns.map(lambda spans: trajectory(*spans)), st.just(failure()))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(samples, min_size=1, max_size=3), min_size=1, max_size=3))
def test_unpadding_gives_back_every_trajectory_and_all_lengths_agree(groups):
    made = [group(*members, index=index) for index, members in enumerate(groups)]
    batch = to_batch(made, pad_token_id=PAD)
    flat = [sample for members in groups for sample in members]
    assert len(batch) == len(flat)
    packed = batch.packed()
    assert packed.cu_seqlens[-1] == packed.token_ids.shape[0] == packed.token_mask.shape[0]
    assert packed.cu_seqlens.diff().tolist() == batch.lengths.tolist()
    for index, sample in enumerate(flat):
        length = int(batch.lengths[index])
        start, end = packed.cu_seqlens[index : index + 2].tolist()
        log = batch.final_batch["message_log"][index]
        for name in ("token_ids", "token_mask", "generation_logprobs"):
            padded = getattr(batch, name)[index]
            assert padded[:length].tolist() == getattr(packed, name)[start:end].tolist()
            assert not padded[length:].any() or name == "token_ids"
        assert torch.cat([m["token_ids"] for m in log]).tolist() == (
            batch.token_ids[index, :length].tolist()
        )
        assert torch.cat([m["token_loss_mask"] for m in log]).tolist() == (
            batch.token_mask[index, :length].tolist()
        )
        for message in log:
            assert message["token_ids"].shape == message["token_loss_mask"].shape
            if message["role"] == "assistant":
                assert message["generation_logprobs"].shape == message["token_ids"].shape
        if isinstance(sample, Trajectory):
            assert batch.token_ids[index, :length].tolist() == sample.token_ids.tolist()
            assert batch.token_mask[index, :length].tolist() == sample.token_mask().tolist()
            assert batch.generation_logprobs[index, :length].tolist() == sample.logprobs.tolist()


def test_each_token_says_which_weights_sampled_it():
    spans = (WeightVersionSpan("3", 2, 4), WeightVersionSpan("4", 4, 5))
    batch = batch_of(trajectory((2, 3), (1, 0), weight_versions=spans), failure())
    assert batch.weight_versions.tolist() == [[-1, -1, 3, 3, 4, -1], [-1] * 6]
    assert batch.packed().weight_versions.tolist() == [-1, -1, 3, 3, 4, -1, -1]


def test_a_version_that_is_no_number_is_unknown():
    made = trajectory((1, 2), weight_versions=(WeightVersionSpan("step-seven", 1, 3),))
    assert made.token_versions().tolist() == [-1, -1, -1]
