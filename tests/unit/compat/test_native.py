import asyncio

import pytest
import torch

from gymrl.compat.nemo_rl import (
    run_async_multi_turn_rollout,
    run_async_multi_turn_rollout_groups,
    run_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from gymrl.environments import EnvironmentReturn
from gymrl.errors import RolloutDataFailure
from gymrl.generation import Generated


class Characters:
    pad_token_id = 0

    def encode(self, text, add_special_tokens=False):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids)


class Policy:
    """Says ``ab`` to everything."""

    max_model_len = 64

    def __init__(self):
        self.samplings = []

    async def generate(self, prompt_ids, sampling, *, on_token=None):
        self.samplings.append(sampling)
        return Generated(token_ids=[97, 98], logprobs=[-0.5, -0.25], finish_reason="stop")


class Countdown:
    """Ends after as many answers as the metadata says, 1 for the last; NaN is never scored."""

    def step(self, message_logs, metadata):
        left = [meta["turns"] - 1 for meta in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "?"}] * len(left),
            metadata=[{"turns": n} for n in left],
            next_stop_strings=[None] * len(left),
            rewards=[float("nan") if n < 0 else float(n == 0) for n in left],
            terminateds=[n <= 0 for n in left],
        )


def batch(*turns):
    return {
        "message_log": [
            [{"role": "user", "content": "hi", "token_ids": torch.tensor([104, 105])}]
            for _ in turns
        ],
        "task_name": ["count"] * len(turns),
        "extra_env_info": [{"turns": n} for n in turns],
        "loss_multiplier": torch.tensor([0.5] * len(turns)),
        "idx": list(range(len(turns))),
    }


ENVIRONMENTS = {"count": Countdown()}


@pytest.mark.parametrize("run", [run_multi_turn_rollout, run_async_multi_turn_rollout])
def test_both_schedulers_play_every_sample_to_its_end(run):
    given = batch(1, 2)
    final, metrics = run(Policy(), given, Characters(), ENVIRONMENTS, max_seq_len=64)
    assert final["total_reward"].tolist() == [1.0, 1.0]
    assert final["truncated"].tolist() == [False, False]
    assert final["loss_multiplier"].tolist() == [0.5, 0.5]
    assert final["idx"] == [0, 1]
    roles = [[message["role"] for message in log] for log in final["message_log"]]
    assert roles == [["user", "assistant"], ["user", "assistant", "user", "assistant"]]
    tokens = [[message["token_ids"].tolist() for message in log] for log in final["message_log"]]
    assert tokens == [[[104, 105], [97, 98]], [[104, 105], [97, 98], [63], [97, 98]]]
    assert final["message_log"][1][3]["generation_logprobs"].tolist() == [-0.5, -0.25]
    assert metrics["avg_turns_per_sample"] == 1.5
    assert metrics["natural_termination_rate"] == 1.0
    assert metrics["turns_per_sample/histogram"] == [1.0, 2.0]
    assert [message["content"] for log in given["message_log"] for message in log] == ["hi", "hi"]


def test_turns_are_limited():
    final, metrics = run_multi_turn_rollout(
        Policy(), batch(5), Characters(), ENVIRONMENTS, max_seq_len=64, max_rollout_turns=2
    )
    assert metrics["max_turns_reached_rate"] == 1.0
    assert final["total_reward"].tolist() == [0.0]


def test_greedy_and_the_policys_own_sampling_reach_the_generator():
    policy = Policy()
    policy.cfg = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 5}
    run_multi_turn_rollout(policy, batch(1), Characters(), ENVIRONMENTS, max_seq_len=64)
    assert (policy.samplings[0].temperature, policy.samplings[0].top_p) == (0.7, 0.9)
    assert policy.samplings[0].max_tokens == 5
    run_multi_turn_rollout(
        policy, batch(1), Characters(), ENVIRONMENTS, max_seq_len=64, greedy=True
    )
    assert policy.samplings[1].temperature == 0.0


async def test_groups_come_in_input_order_with_metrics_of_their_own():
    results = [
        result
        async for result in run_async_multi_turn_rollout_groups(
            Policy(), batch(3, 2, 1, 1), Characters(), ENVIRONMENTS, 64, num_generations=2
        )
    ]
    assert [result.group_index for result in results] == [0, 1]
    assert [result.task_index for result in results] == [0, 1]
    means = [result.rollout_metrics["turns_per_sample/mean"] for result in results]
    assert means == [2.5, 1.0]
    assert [len(result.final_batch["message_log"]) for result in results] == [2, 2]
    assert results[1].final_batch["idx"] == [2, 3]
    assert results[0].rollout_metrics["baseline_reward/pct_1"] == 100.0


@pytest.mark.parametrize("count", [0, 3])
async def test_a_count_that_does_not_fit_is_refused(count):
    groups = run_async_multi_turn_rollout_groups(
        Policy(), batch(1, 1), Characters(), ENVIRONMENTS, 64, num_generations=count
    )
    with pytest.raises(ValueError, match=f"num_generations={count}"):
        await anext(groups)


async def test_a_failed_sample_is_a_runtime_error_and_no_zero():
    groups = run_async_multi_turn_rollout_groups(
        Policy(), batch(1, 0), Characters(), ENVIRONMENTS, 64, num_generations=1
    )
    with pytest.raises(RuntimeError, match="row 1") as caught:
        await anext(groups)
    assert isinstance(caught.value, RolloutDataFailure)


async def test_one_sample_is_a_batch_of_one():
    state = {name: column[0] for name, column in batch(2).items()}
    final, metrics = await run_sample_multi_turn_rollout(
        7, state, Policy(), Characters(), ENVIRONMENTS, 64
    )
    assert final["total_reward"].item() == 1.0
    assert final["idx"] == 0
    assert len(final["message_log"]) == 4
    assert metrics["total_turns"] == 2


async def test_a_blocking_call_is_refused_where_a_loop_runs():
    assert asyncio.get_running_loop().is_running()
    for run in (run_multi_turn_rollout, run_async_multi_turn_rollout):
        with pytest.raises(RuntimeError, match="event loop runs"):
            run(Policy(), batch(1), Characters(), ENVIRONMENTS, max_seq_len=64)
