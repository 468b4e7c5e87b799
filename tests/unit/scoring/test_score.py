import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import ConfigError, RewardContractError
from gymrl.scoring import (
    GroupStats,
    ScoringConfig,
    env_reward,
    resolve_scoring,
    score,
    score_group,
)
from gymrl.types import Failure, RolloutGroup, Trajectory
from tests.unit.scoring.samples import (
    failure,
    group,
    ledger,
    message,
    result,
    sized,
    trajectory,
    written,
)

EFFORT = {"low_weight": 1.0, "low_ub": 10, "low_string": "briefly"}
BRIEF = {"responses_create_params": {"input": [{"role": "user", "content": "answer briefly"}]}}


def resolved(**values):
    training = values.pop("training", True)
    limit = values.pop("max_total_tokens", None)
    config = ScoringConfig.from_dict(values)
    return resolve_scoring(config, list, max_total_tokens=limit, training=training)


def chars(**rules):
    return {"default": {"length_type": "chars", **rules}}


# Order


def test_the_order_is_effort_then_penalties_then_length():
    scoring = resolved(
        effort=EFFORT,
        penalties={"penalize_empty_final_answer": True},
        length_penalty=chars(total_bonus=0.25),
    )
    # Ten sampled tokens make a length reward of 0, so rewards stay binary.
    ten = (((1,), (2,) * 10),)
    empty = trajectory(1.0, pairs=ten, answer=result(message(" ")))
    short = trajectory(1.0, pairs=ten, answer=result(message("ab")))
    long = trajectory(1.0, pairs=ten, answer=result(message("abc")))
    scored = score_group(group(empty, short, long, body=BRIEF), scoring)
    assert [ledger(sample) for sample in scored.trajectories] == [
        [("effort", 1.0), ("empty_final_answer", 0.0)],
        [("effort", 1.0), ("length_penalty/total_bonus", 1.25)],
        [("effort", 1.0)],
    ]


def test_a_penalty_takes_away_what_effort_shaping_gave():
    scoring = resolved(effort=EFFORT, penalties={"penalize_empty_final_answer": True})
    sample = trajectory(1.0, answer=result(message("")))
    scored = score_group(group(sample, body=BRIEF), scoring).trajectories[0]
    assert ledger(scored) == [("effort", 1.8), ("empty_final_answer", 0.0)]
    assert (scored.reward.verifier, env_reward(scored.reward)) == (1.0, 0.0)


def test_effort_shaping_makes_rewards_that_the_length_rules_leave_alone():
    scoring = resolved(effort=EFFORT, length_penalty=chars(total_bonus=0.25))
    out = score(group(sized(1.0, 0, 5), body=BRIEF), scoring)
    assert ledger(out.group.trajectories[0]) == [("effort", 1.8)]
    assert len(out.warnings) == 1


def test_nothing_is_on_by_default():
    before = group(trajectory(1.0), trajectory(0.0))
    after = score_group(before, resolved())
    assert after.samples == before.samples
    assert "total_reward/mean" in after.metrics


def test_validation_never_has_the_length_penalty():
    values = {"length_penalty": chars(total_bonus=0.25)}
    samples = group(sized(1.0, 0, 2), sized(1.0, 0, 5))
    assert score_group(samples, resolved(**values)).trajectories[0].reward.total == 1.25
    validated = score_group(samples, resolved(**values, training=False))
    assert validated.samples == samples.samples
    assert not any(name.startswith("length_penalty/") for name in validated.metrics)


def test_a_penalised_pass_is_no_pass_for_the_length_rules():
    scoring = resolved(
        penalties={"penalize_unwanted_tokens": True, "token_ids": {"unwanted": [99]}},
        length_penalty=chars(pass_rate_length_penalty_weight=0.5),
    )
    bad = sized(1.0, 0, 9, pairs=(((1,), (99,)),))
    scored = score_group(group(sized(1.0, 0, 4), bad), scoring)
    assert [t.reward.total for t in scored.trajectories] == [0.75, 0.0]


# Refusals


def test_the_verifiers_contract_is_checked_before_anything():
    scoring = resolved(penalties={"penalize_empty_final_answer": True})
    broken = trajectory(1.0, components={"a": 0.25})
    with pytest.raises(RewardContractError, match="row 5, agent agent"):
        score_group(group(trajectory(1.0), broken, first_row=4), scoring)


def test_a_penalty_does_not_blame_the_verifier():
    # The contract is on the verifier's values: a penalised total differs from their sum.
    scoring = resolved(penalties={"penalize_empty_final_answer": True})
    sample = trajectory(1.0, components={"a": 0.5, "b": 0.5}, answer=result(message("")))
    scored = score_group(group(sample), scoring).trajectories[0]
    assert scored.reward.total == 0.0
    assert scored.reward.components == {"a": 0.5, "b": 0.5}


def test_a_group_is_not_scored_twice():
    scoring = resolved(penalties={"penalize_empty_final_answer": True})
    once = score_group(group(trajectory(1.0, answer=result(message("")))), scoring)
    with pytest.raises(ValueError, match="row 0 has been scored before"):
        score_group(once, scoring)


def test_lengths_in_tokens_without_a_tokenizer_are_refused_at_the_start():
    config = ScoringConfig.from_dict({"length_penalty": {"default": {"total_bonus": 0.1}}})
    with pytest.raises(ConfigError, match="tokenizer"):
        resolve_scoring(config)
    resolve_scoring(config, training=False)


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="lenght_penalty"):
        ScoringConfig.from_dict({"lenght_penalty": {}})
    with pytest.raises(ConfigError, match="low_ub"):
        ScoringConfig.from_dict({"effort": {**EFFORT, "low_ub": 0}})


# Failures and masks


def test_a_failed_row_keeps_its_place_and_enters_no_comparison():
    # huggingface/trl#5902: an attempt without a reward is no reward of 0.
    scoring = resolved(length_penalty=chars(pass_rate_length_penalty_weight=0.5))
    before = group(sized(1.0, 0, 4), failure(), sized(1.0, 0, 2))
    after = score_group(before, scoring)
    assert after.samples[1] is before.samples[1]
    # The pass rate is 2 of 2, not 2 of 3.
    assert [t.reward.total for t in after.trajectories] == [0.5, 0.75]
    assert after.metrics["length_penalty/env_reward_mean"] == 1.0
    assert after.metrics["rollout_failures/infra"] == 1.0


def test_a_group_of_failures_comes_back_counted():
    scoring = resolved(
        effort=EFFORT,
        penalties={"penalize_empty_final_answer": True},
        length_penalty=chars(total_bonus=0.1),
    )
    before = group(failure(), failure(), body=BRIEF)
    after = score_group(before, scoring)
    assert after.samples == before.samples
    assert after.metrics == {
        "rollout_failures/infra": 2.0,
        "rollout_failures/RolloutTimeout": 2.0,
    }


def test_the_environments_flag_masks_and_keeps_the_reward():
    flagged = trajectory(1.0, answer=result(message("x"), instance_config={"mask_sample": True}))
    before = group(flagged, trajectory(0.0))
    after = score_group(before, resolved())
    assert [t.mask_sample for t in after.trajectories] == [True, False]
    assert after.metrics["total_reward/mean"] == 0.5
    unmasked = score_group(before, resolved(should_mask_flagged_samples=False))
    assert [t.mask_sample for t in unmasked.trajectories] == [False, False]


# Metrics of a scored group


def test_a_scored_groups_metrics_tell_every_step():
    scoring = resolved(
        effort=EFFORT,
        penalties={"penalize_empty_final_answer": True},
        length_penalty=chars(longest_total_penalty=0.25),
        max_total_tokens=4,
    )
    first, second = sized(1.0, 0, 3), sized(1.0, 0, 5)
    metrics = score_group(group(first, second), scoring).metrics
    assert metrics["mean_length_high"] == 2.0
    assert "mean_reward_low" not in metrics
    assert metrics["empty_final_answer_rate"] == 0.0
    assert metrics["length_penalty/reward_delta_mean"] == -0.125
    assert metrics["total_reward/mean"] == 0.875
    assert metrics["baseline_reward/pct_1"] == 100.0
    assert metrics["truncation_rate"] == 1.0


def test_metrics_that_a_group_brings_are_kept():
    before = group(trajectory(1.0))
    bringing = RolloutGroup(
        index=0, task_index=0, rows=before.rows, samples=before.samples, metrics={"mine": 3.0}
    )
    assert score_group(bringing, resolved()).metrics["mine"] == 3.0


def test_tables_are_kept_when_the_configuration_asks():
    out = score(group(trajectory(1.0)), resolved(log_full_result_tables=True))
    assert len(out.stats.table_rows()["agent/full_result"]) == 1


def test_a_verbose_length_penalty_leaves_a_report():
    scoring = resolved(length_penalty={"verbose": True, **chars(total_bonus=0.5)})
    out = score(group(sized(1.0, 1, 2)), scoring)
    assert out.length_report.lines()[1].endswith("total_bonus=+0.5000")


# Properties

EVERYTHING = {
    "effort": EFFORT,
    "penalties": {
        "penalize_duplicated_reasoning": True,
        "penalize_empty_final_answer": True,
        "penalize_unwanted_tokens": True,
        "penalize_malformed_think_tag": True,
        "token_ids": {"unwanted": [99], "think_open": 12, "think_close": 13},
    },
    "length_penalty": {
        "default": {
            "length_type": "chars",
            "total_bonus": 0.1,
            "longest_answer_penalty": 0.4,
            "group_reasoning_length_penalty_coeff": 0.3,
            "total_zmad_threshold": 1.0,
            "total_zmad_penalty": 0.4,
            "profiled_length_penalty": 0.3,
            "pass_rate_length_penalty_weight": 0.6,
            "profile_band_total": True,
        }
    },
}
BODIES = [
    BRIEF,
    {
        "responses_create_params": {"input": "at length"},
        "profiled_rewards": [1, 1, 0],
        "profiled_output_lengths": [6, 10, 90],
        "profile_band": {"total": {"a": 4, "b": 12, "f": 0.25}},
    },
]
ids = st.lists(st.sampled_from([1, 2, 12, 13, 99]), min_size=1, max_size=4).map(tuple)
texts = st.text("ab ", max_size=12)
attempts = st.builds(
    written,
    st.sampled_from([0.0, 1.0]),
    texts,
    texts,
    pairs=st.lists(st.tuples(ids, ids), min_size=1, max_size=3),
    mask_sample=st.booleans(),
    agent=st.just("agent"),
)
samples = st.lists(st.one_of(attempts, attempts, st.builds(failure)), min_size=1, max_size=6)
groups = st.builds(
    lambda members, body, number: group(*members, body=body, first_row=number, index=number),
    samples,
    st.sampled_from(BODIES),
    st.integers(0, 50),
)


def facts(value):
    """A record as plain data, arrays and ledgers included."""
    if isinstance(value, Trajectory | Failure | RolloutGroup):
        return [facts(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [facts(part) for part in value]
    return repr(value)


@settings(max_examples=40, deadline=None)
@given(groups)
def test_scoring_never_changes_its_input(before):
    kept = facts(copy.deepcopy(before))
    score_group(before, resolved(**EVERYTHING))
    assert facts(before) == kept


@settings(max_examples=40, deadline=None)
@given(groups)
def test_the_verifiers_value_and_every_step_stay_on_the_ledger(before):
    after = score_group(before, resolved(**EVERYTHING))
    for sample, scored in zip(before.trajectories, after.trajectories, strict=True):
        assert scored.reward.verifier == sample.reward.verifier
        assert scored.reward.components == sample.reward.components
        assert scored.token_ids is sample.token_ids
        assert scored.reward.total == (ledger(scored) or [("", sample.reward.verifier)])[-1][1]
    for place, sample in enumerate(before.samples):
        if isinstance(sample, Failure):
            assert after.samples[place] is sample


@settings(max_examples=25, deadline=None)
@given(st.lists(groups, min_size=1, max_size=4), st.randoms())
def test_the_order_of_completion_changes_nothing(batch, random):
    scoring = resolved(**EVERYTHING)
    in_order = [score(one, scoring) for one in batch]
    order = list(range(len(batch)))
    random.shuffle(order)
    as_completed = {place: score(batch[place], scoring) for place in order}
    for place, scored in enumerate(in_order):
        assert facts(as_completed[place].group) == facts(scored.group)
    merged = GroupStats.merged(as_completed[place].stats for place in order)
    assert merged.scalars() == GroupStats.merged(s.stats for s in in_order).scalars()


@settings(max_examples=60, deadline=None)
@given(groups)
def test_a_total_is_a_finite_number_json_can_carry(before):
    for scored in score_group(before, resolved(**EVERYTHING)).trajectories:
        assert json.loads(json.dumps(scored.reward.total)) == scored.reward.total


# The guide

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "rewards.md"


def test_every_configuration_of_the_guide_is_one():
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        config = ScoringConfig.from_dict(yaml.safe_load(block))
        resolve_scoring(config, list)


def test_the_guides_example_does_what_it_says():
    scoring = resolved(
        penalties={"penalize_empty_final_answer": True},
        length_penalty=chars(longest_total_penalty=0.25),
    )
    scored = score_group(group(sized(1.0, 0, 3), sized(1.0, 0, 5)), scoring)
    reward = scored.trajectories[1].reward
    assert ledger(scored.trajectories[1]) == [("length_penalty/longest_total_penalty", 0.75)]
    assert (reward.verifier, env_reward(reward), reward.total) == (1.0, 1.0, 0.75)
