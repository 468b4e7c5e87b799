import pytest

from gymrl.scoring.metrics import SHARED_GENRM_METRICS, group_stats
from gymrl.scoring.stats import GroupStats
from gymrl.types import FailureKind
from tests.unit.scoring.samples import failure, group, message, result, trajectory

STATISTICS = ("mean", "max", "min", "median", "stddev", "p95", "p99")


def graded(reward, **fields):
    return trajectory(reward, answer=result(message("x"), reward=reward, **fields))


def scalars(*samples, **options):
    return group_stats(group(*samples), **options).scalars()


def test_sizes_are_per_sample():
    one = trajectory(1.0, pairs=(((1, 2), (3, 4, 5)), ((6,), (7,))))
    two = trajectory(0.0, pairs=(((1,), (2, 3)),))
    found = scalars(one, two)
    assert found["turns_per_sample/mean"] == 1.5
    assert found["turns_per_sample/max"] == 2.0
    assert found["total_tokens_per_sample/min"] == 3.0
    assert found["total_tokens_per_sample/max"] == 7.0
    assert found["gen_tokens_per_sample/mean"] == 3.0
    assert found["mean_gen_tokens_per_sample"] == 3.0
    assert found["max_gen_tokens_per_turn/max"] == 3.0
    assert found["max_gen_tokens_per_turn/min"] == 2.0
    assert found["total_reward/mean"] == 0.5
    assert found["total_reward/stddev"] == pytest.approx(0.5**0.5)


def test_every_size_has_every_statistic():
    stats = group_stats(group(graded(1.0), graded(0.0)))
    for name in (
        "turns_per_sample",
        "total_tokens_per_sample",
        "gen_tokens_per_sample",
        "max_gen_tokens_per_turn",
        "total_reward",
        "agent/reward",
    ):
        assert {f"{name}/{statistic}" for statistic in STATISTICS} <= stats.scalars().keys()
        assert len(stats.histograms()[f"{name}/histogram"]) == 2


def test_agents_report_the_union_of_their_keys_and_not_the_first_rows():
    found = scalars(
        graded(1.0, accuracy=True),
        graded(0.0, accuracy=False, steps=4, extracted="7", judge=None, parts=[1]),
        graded(0.0, steps=8),
    )
    assert found["agent/accuracy/mean"] == 0.5
    assert found["agent/steps/mean"] == 6.0
    assert found["agent/steps/p99"] == 8.0
    assert not any("extracted" in name or "judge" in name or "parts" in name for name in found)


def test_agents_are_reported_apart():
    math = trajectory(1.0, agent="math", answer=result(score=1))
    code = trajectory(0.0, agent="code", answer=result(score=3))
    found = scalars(math, code)
    assert (found["math/score/mean"], found["code/score/mean"]) == (1.0, 3.0)
    assert (found["math/reward/mean"], found["code/reward/mean"]) == (1.0, 0.0)


def test_an_agents_reward_is_the_total_after_scoring():
    sample = graded(1.0)
    scored = type(sample)(
        **{
            **{name: getattr(sample, name) for name in sample.__struct_fields__},
            "reward": sample.reward.adjusted("empty_final_answer", 0.0),
        }
    )
    found = scalars(scored)
    assert found["agent/reward/mean"] == 0.0
    assert found["total_reward/mean"] == 0.0


def test_scalars_of_a_reward_model_are_shared_by_all_agents_where_present():
    found = scalars(
        trajectory(agent="a", answer=result(reward_score_raw=1.0, reward_overall_score_raw=3.0)),
        trajectory(agent="b", answer=result(reward_score_raw=2.0)),
        trajectory(agent="c", answer=result(reward_rubric_aggregate_valid=None)),
    )
    assert found["reward_score_raw"] == 1.5
    assert found["reward_overall_score_raw"] == 3.0
    assert "reward_rubric_aggregate_valid" not in found
    assert "reward_rubric_aggregate_valid" in SHARED_GENRM_METRICS


@pytest.mark.parametrize(
    ("rewards", "pct_0", "pct_1", "pct_mixed"),
    [
        ((0.0, 0.0), 100.0, 0.0, 0.0),
        ((1.0, 1.0), 0.0, 100.0, 0.0),
        ((0.0, 1.0), 0.0, 0.0, 100.0),
        ((0.5, 0.5), 0.0, 0.0, 100.0),
    ],
)
def test_a_group_is_all_wrong_all_right_or_mixed(rewards, pct_0, pct_1, pct_mixed):
    found = scalars(*(graded(reward) for reward in rewards))
    assert found["baseline_reward/pct_0"] == pct_0
    assert found["baseline_reward/pct_1"] == pct_1
    assert found["baseline_reward/pct_mixed"] == pct_mixed


def test_diagnostics_count_groups_and_not_samples():
    groups = [group(graded(0.0)), group(graded(1.0), graded(0.0), graded(0.0), graded(1.0))]
    merged = GroupStats.merged(group_stats(one) for one in groups).scalars()
    assert merged["baseline_reward/pct_0"] == 50.0
    assert merged["baseline_reward/pct_mixed"] == 50.0
    assert merged["group_reward_range/mean"] == 0.5
    assert merged["group_reward_std/mean"] == pytest.approx((1 / 3) ** 0.5 / 2)


def test_the_spread_of_a_group_of_one_is_zero():
    found = scalars(graded(1.0))
    assert found["group_reward_std/mean"] == 0.0
    assert found["group_reward_range/mean"] == 0.0
    assert found["total_reward/stddev"] == 0.0


def test_truncation_and_natural_ends_are_rates():
    found = scalars(
        trajectory(),
        trajectory(incomplete_reason="max_output_tokens"),
        trajectory(pairs=(((1, 2, 3), (4, 5)),)),
        trajectory(placeholder=True),
        max_total_tokens=5,
    )
    assert found["truncation_rate"] == 0.5
    assert found["natural_termination_rate"] == 0.25


def test_a_failure_is_in_no_mean_and_no_baseline_but_counted():
    # NVIDIA-NeMo/RL#3470: an infrastructure failure must not enter as a sample of reward 0.
    found = scalars(
        graded(1.0), failure(), graded(1.0), failure("GymRequestError", FailureKind.DATA)
    )
    assert found["total_reward/mean"] == 1.0
    assert found["agent/reward/mean"] == 1.0
    assert found["baseline_reward/pct_1"] == 100.0
    assert found["rollout_failures/infra"] == 1.0
    assert found["rollout_failures/data"] == 1.0
    assert found["rollout_failures/RolloutTimeout"] == 1.0
    assert found["rollout_failures/GymRequestError"] == 1.0


def test_a_group_of_failures_reports_its_failures_and_nothing_else():
    assert scalars(failure(), failure()) == {
        "rollout_failures/infra": 2.0,
        "rollout_failures/RolloutTimeout": 2.0,
    }


def test_a_masked_sample_counts_like_any_other():
    found = scalars(graded(1.0), trajectory(0.0, mask_sample=True))
    assert found["total_reward/mean"] == 0.5


def test_results_become_tables_only_when_asked_for():
    samples = group(graded(1.0, note="a"), failure(), graded(0.0, note="b"), first_row=4)
    assert group_stats(samples).table_rows() == {}
    rows = group_stats(samples, with_tables=True).table_rows()["agent/full_result"]
    assert [text.encode() for text in rows] == [t.result for t in samples.trajectories]
