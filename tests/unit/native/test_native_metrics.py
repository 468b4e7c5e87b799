import pytest

from gymrl.rollout.native import NativeConfig, NativePrompt, run_native_rollout
from gymrl.scoring.native_metrics import native_group_stats, native_scalars
from gymrl.scoring.stats import GroupStats
from gymrl.testing import ScriptedGenerator
from tests.unit.native.worlds import Characters, Scripted, says


def world(log, metadata):
    """Two prompts: `a` ends by itself on turn 2, `b` never, and is told more than fits."""
    is_a = log[0]["content"] == "a"
    turn = (len(log) - 1) // 2
    return {
        "observation": "yy" if is_a else "y" * 4,
        "reward": 1.0 if is_a else 0.25,
        "terminated": is_a and turn == 1,
    }


async def a_rollout(**config):
    return await run_native_rollout(
        [NativePrompt(task_name="w", messages=[{"role": "user", "content": c}]) for c in "ab"],
        ScriptedGenerator(lambda prompt, sampling: says("xxx")),
        {"w": Scripted(world)},
        codec=Characters(),
        config=NativeConfig(max_seq_len=20, failure_policy="mask", **config),
        num_generations=2,
    )


async def test_the_numbers_of_a_known_run_are_what_one_counts_by_hand():
    rollout = await a_rollout()

    # a: 1 + 3 + 2 + 3 + 2 (last observation). b: 1, then (3 + 4) twice, 3, and 2 of 4 that fit.
    expected = {
        "turns_per_sample/mean": 2.5,
        "turns_per_sample/max": 3.0,
        "total_turns": 10.0,
        "avg_turns_per_sample": 2.5,
        "max_turns_per_sample": 3.0,
        "natural_termination_rate": 0.5,
        "truncation_rate": 0.5,
        "max_turns_reached_rate": 0.0,
        "mean_gen_tokens_per_sample": 7.5,
        "max_gen_tokens_per_sample": 9.0,
        "mean_total_tokens_per_sample": (11 + 20) / 2,
        "mean_env_tokens_per_sample": (4 + 10) / 2,
        "max_gen_tokens_per_turn/max": 3.0,
        "mean_total_reward": (2.0 + 0.75) / 2,
        "min_total_reward": 0.75,
        "max_total_reward": 2.0,
        "per_worker_token_counts/0": 30.0,
    }
    assert {name: rollout.metrics[name] for name in expected} == expected
    histograms = rollout.histograms()
    assert histograms["turns_per_sample/histogram"] == [2.0, 2.0, 3.0, 3.0]
    assert histograms["histogram/gen_tokens_length"] == [3.0] * 10
    assert (
        histograms["histogram/input_tokens_length"]
        == [1.0] * 4 + [6.0] * 2 + [8.0] * 2 + [15.0] * 2
    )
    assert histograms["histogram/total_tokens_length"][-1] == 18.0


async def test_max_turns_reached_is_a_rate_of_its_own():
    rollout = await a_rollout(max_turns=2)

    assert rollout.metrics["max_turns_reached_rate"] == 0.5
    assert rollout.metrics["natural_termination_rate"] == 0.5
    assert rollout.metrics["truncation_rate"] == 0.0


@pytest.mark.parametrize("scheduler", ["async", "batched"])
async def test_metrics_of_groups_combine_into_those_of_the_batch(scheduler):
    rollout = await a_rollout(scheduler=scheduler)

    together = GroupStats.merged([native_group_stats(group) for group in rollout.groups])

    assert native_scalars(together) == rollout.metrics


async def test_a_group_without_a_trajectory_has_counts_and_no_means():
    rollout = await run_native_rollout(
        [NativePrompt(task_name="w", messages=[{"role": "user", "content": "too long"}])],
        ScriptedGenerator([]),
        {"w": Scripted(world)},
        codec=Characters(),
        config=NativeConfig(max_seq_len=3, failure_policy="mask"),
    )

    assert rollout.metrics == {
        "rollout_failures/data": 1.0,
        "rollout_failures/NoGenerationError": 1.0,
    }
