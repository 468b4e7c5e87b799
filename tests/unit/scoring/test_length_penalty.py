import json

import pytest

from gymrl.errors import ConfigError
from gymrl.scoring.answer import Answer, RowBody
from gymrl.scoring.length_penalty import (
    LengthPenaltyConfig,
    Lengths,
    apply_length_penalty,
    env_reward,
    output_lengths,
)
from gymrl.scoring.length_penalty.profile import compare_with_limit, read_profile
from gymrl.types import Reward
from tests.unit.scoring.samples import ledger, message, reasoning, result, sized, trajectory

BAND = {"a": 10, "b": 20, "f": 0.5}


def apply(rules, *samples, row=None, count_tokens=None, **block):
    config = LengthPenaltyConfig.from_dict({"default": {"length_type": "chars", **rules}, **block})
    return apply_length_penalty(
        config,
        samples,
        [Answer(sample.result) for sample in samples],
        RowBody(json.dumps(row or {}).encode()),
        count_tokens,
    )


def totals(outcome):
    return [sample.reward.total for sample in outcome.trajectories]


# Lengths


def view(*items):
    return Answer(json.dumps(result(*items)).encode())


def test_only_the_models_own_reasoning_and_messages_are_counted():
    items = (
        reasoning("12345"),
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "output": "not counted"},
        message("observation", role="user"),
        {"type": "message", "content": "abc"},
        message("de"),
        {"type": "web_search_call", "content": "not counted"},
    )
    assert output_lengths(view(*items), len) == Lengths(reasoning=5, answer=5)
    assert output_lengths(view(*items), len).total == 10


def test_odd_items_have_no_length():
    items = (None, 5, {"type": "reasoning", "summary": None}, {"type": "message", "content": None})
    assert output_lengths(view(*items), len) == Lengths(0, 0)


def test_tokens_are_counted_item_by_item_and_never_on_empty_texts():
    asked = []

    def count(text):
        asked.append(text)
        return len(text.split())

    items = (reasoning("a b"), reasoning("c d"), message(""), message("e"))
    assert output_lengths(view(*items), count) == Lengths(reasoning=4, answer=1)
    assert asked == ["a b", "c d", "e"]


def test_lengths_in_tokens_need_a_tokenizer():
    with pytest.raises(ConfigError, match="tokenizer"):
        apply({"length_type": "tokens"}, sized(1.0, 2, 3))


def test_lengths_in_tokens_come_from_the_tokenizer():
    outcome = apply(
        {"length_type": "tokens", "pass_rate_length_penalty_weight": 0.5},
        trajectory(1.0, answer=result(message("one two three four"))),
        trajectory(1.0, answer=result(message("wwwwwwwwwwwwwwwwwwwwwwwwwwwww x"))),
        count_tokens=lambda text: len(text.split()),
    )
    assert totals(outcome) == pytest.approx([0.5, 0.75])


# Who is left alone


@pytest.mark.parametrize("other", [0.5, -1.0, 2.0, 1e-9])
def test_a_group_with_a_graded_reward_is_skipped_whole_with_one_warning(other):
    samples = (sized(1.0, 5, 5), sized(other, 3, 3))
    outcome = apply({"total_bonus": 0.1}, *samples)
    assert outcome.trajectories == samples
    assert outcome.stats.scalars()["length_penalty/skipped_non_binary_frac"] == 1.0
    again = apply({"total_bonus": 0.1}, *samples)
    assert len({*outcome.warnings, *again.warnings}) == 1
    assert "agent 'agent'" in outcome.warnings[0].message


def test_a_group_with_components_is_skipped():
    samples = (sized(1.0, 5, 5, components={"a": 1.0}), sized(0.0, 3, 3))
    outcome = apply({"total_bonus": 0.1}, *samples)
    assert outcome.trajectories == samples
    assert len(outcome.warnings) == 1


def test_a_skipped_group_is_not_clamped():
    assert totals(apply({"total_bonus": 0.1}, sized(-1.0, 5, 5), sized(1.0, 5, 5))) == [-1.0, 1.0]


def test_a_disabled_agent_is_skipped_before_the_check_and_without_a_warning():
    outcome = apply(
        {"total_bonus": 0.1},
        sized(0.5, 5, 5, agent="judge"),
        agent_overrides={"judge": {"enabled": False}},
    )
    assert outcome.warnings == ()
    assert outcome.stats.scalars()["length_penalty/skipped_non_binary_frac"] == 0.0


def test_wrong_rollouts_are_never_adjusted():
    rules = {
        "total_bonus": 0.1,
        "longest_total_penalty": 0.1,
        "group_total_length_penalty_coeff": 0.1,
        "pass_rate_length_penalty_weight": 0.1,
        "profiled_length_penalty": 0.1,
        "profile_band_total": True,
    }
    row = {
        "profiled_rewards": [1, 1],
        "profiled_output_lengths": [1, 1],
        "profile_band": {"total": {"a": 1, "b": 2, "f": 0.5}},
    }
    outcome = apply(rules, sized(0.0, 9, 9), sized(0.0, 2, 2), row=row)
    assert [ledger(sample) for sample in outcome.trajectories] == [[], []]
    assert totals(outcome) == [0.0, 0.0]


def test_an_empty_group_is_no_error():
    assert apply({"total_bonus": 0.1}).trajectories == ()


# The rules on the ledger


def test_each_channel_has_its_own_rules():
    samples = (sized(1.0, 5, 9), sized(1.0, 8, 1), sized(0.0, 1, 1))
    for rules, expected in [
        ({"reasoning_bonus": 0.1}, [1.1, 1.0, 0.0]),
        ({"answer_bonus": 0.1}, [1.0, 1.1, 0.0]),
        ({"total_bonus": 0.1}, [1.0, 1.1, 0.0]),
        ({"longest_reasoning_penalty": 0.1}, [1.0, 0.9, 0.0]),
        ({"longest_answer_penalty": 0.1}, [0.9, 1.0, 0.0]),
        ({"longest_total_penalty": 0.1}, [0.9, 1.0, 0.0]),
        ({"group_reasoning_length_penalty_coeff": 0.2}, [1.1, 0.9, 0.0]),
        ({"group_answer_length_penalty_coeff": 0.2}, [0.9, 1.1, 0.0]),
        ({"group_total_length_penalty_coeff": 0.2}, [0.9, 1.1, 0.0]),
        ({"pass_rate_length_penalty_weight": 0.3}, [0.8, 1.0 - 0.2 * 9 / 14, 0.0]),
    ]:
        assert totals(apply(rules, *samples)) == pytest.approx(expected), rules


def test_each_zmad_channel_finds_its_own_outlier():
    samples = [sized(1.0, 10 + d, 10) for d in (0, 1, 2, 1)] + [sized(1.0, 50, 10)]
    rules = {"reasoning_zmad_threshold": 3.5, "reasoning_zmad_penalty": 0.5}
    assert totals(apply(rules, *samples)) == [1.0, 1.0, 1.0, 1.0, 0.5]
    rules = {"answer_zmad_threshold": 3.5, "answer_zmad_penalty": 0.5}
    assert totals(apply(rules, *samples)) == [1.0] * 5
    rules = {"total_zmad_threshold": 3.5, "total_zmad_penalty": 0.5}
    assert totals(apply(rules, *samples)) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert totals(apply({"total_zmad_penalty": 0.5}, *samples)) == [1.0] * 5


def test_the_ledger_names_the_settings_that_spoke():
    outcome = apply(
        {"total_bonus": 0.25, "longest_answer_penalty": 0.5},
        sized(1.0, 1, 3),
        sized(1.0, 9, 2),
    )
    assert [ledger(sample) for sample in outcome.trajectories] == [
        [("length_penalty/longest_answer_penalty", 0.5), ("length_penalty/total_bonus", 0.75)],
        [],
    ]


def test_every_additive_rule_looks_at_the_reward_before_all_rules():
    outcome = apply(
        {"total_bonus": 0.25, "pass_rate_length_penalty_weight": 0.5},
        sized(1.0, 2, 2),
        sized(1.0, 4, 4),
    )
    assert totals(outcome) == pytest.approx([1.0 + 0.25 - 0.25, 0.5])


def test_penalties_wipe_a_reward_out_but_never_turn_its_sign():
    outcome = apply(
        {"longest_total_penalty": 0.75, "longest_answer_penalty": 0.75},
        sized(1.0, 1, 1),
        sized(1.0, 5, 5),
    )
    assert ledger(outcome.trajectories[1]) == [
        ("length_penalty/longest_answer_penalty", 0.25),
        ("length_penalty/longest_total_penalty", -0.5),
        ("length_penalty/clamp", 0.0),
    ]
    assert outcome.stats.scalars()["length_penalty/wiped_correct_frac"] == 0.5


# Profiled lengths


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"profiled_rewards": [1, 1, 0], "profiled_output_lengths": [4, 8, 99]}, [1.0, 0.75]),
        ({"profiled_rewards": [1, 0, 0], "profiled_output_lengths": [4, 8, 99]}, [1.0, 1.0]),
        ({"profiled_rewards": [1, None, True], "profiled_output_lengths": [4, 8, 8]}, [1.0, 0.75]),
        ({"profiled_rewards": None, "profiled_output_lengths": [4, 8]}, [1.0, 1.0]),
        ({"profiled_rewards": [1, 1]}, [1.0, 1.0]),
        ({}, [1.0, 1.0]),
    ],
)
def test_rollouts_that_reach_the_rows_profile_lose_the_penalty(row, expected):
    # Passing lengths 4 and 8: mean 6, deviation 2, threshold 8.
    outcome = apply({"profiled_length_penalty": 0.25}, sized(1.0, 3, 4), sized(1.0, 4, 4), row=row)
    assert totals(outcome) == expected
    assert outcome.warnings == ()


def test_profile_lists_of_different_lengths_are_not_used_and_named():
    row = {"profiled_rewards": [1, 1], "profiled_output_lengths": [1, 1, 1]}
    outcome = apply({"profiled_length_penalty": 0.25}, sized(1.0, 4, 4), row=row)
    assert totals(outcome) == [1.0]
    assert "not two lists of one length" in outcome.warnings[0].message


def test_metadata_under_a_nested_key_is_never_read():
    nested = {
        "profiled_rewards": [1, 1],
        "profiled_output_lengths": [1, 1],
        "profile_band": {"total": {"a": 1, "b": 2, "f": 0.5}},
    }
    row = {"extra_env_info": nested, "responses_create_params": {"metadata": nested}}
    rules = {"profiled_length_penalty": 0.25, "profile_band_total": True}
    assert totals(apply(rules, sized(1.0, 4, 4), row=row)) == [1.0]


# Bands


def test_the_rows_band_scales_positive_rewards():
    row = {"profile_band": {"total": BAND}}
    samples = (sized(1.0, 5, 5), sized(1.0, 10, 5), sized(1.0, 30, 5), sized(0.0, 30, 5))
    outcome = apply({"profile_band_total": True}, *samples, row=row)
    assert totals(outcome) == [1.0, 0.75, 0.5, 0.0]
    assert ledger(outcome.trajectories[1]) == [("length_penalty/profile_band_total", 0.75)]


def test_a_band_that_no_setting_switches_on_does_nothing():
    assert totals(apply({}, sized(1.0, 30, 5), row={"profile_band": {"total": BAND}})) == [1.0]


def test_channels_of_the_configuration_are_on_by_default_and_an_override_turns_one_off():
    block = {"profile_band": {"enabled": True, "defaults": {"total": BAND, "answer": BAND}}}
    sample = sized(1.0, 0, 20)
    assert totals(apply({}, sample, **block)) == [0.25]
    off = {"agent_overrides": {"agent": {"profile_band_total": False}}}
    assert totals(apply({}, sample, **block, **off)) == [0.5]
    assert totals(apply({"profile_band_total": False}, sample, **block)) == [0.5]


def test_a_rows_band_wins_over_the_configurations_by_channel():
    block = {"profile_band": {"enabled": True, "defaults": {"total": BAND, "answer": BAND}}}
    row = {"profile_band": {"total": {"a": 100, "b": 200, "f": 0.0}, "answer": None}}
    assert totals(apply({}, sized(1.0, 0, 20), row=row, **block)) == [0.5]


@pytest.mark.parametrize(
    "bad", [{"a": 20, "b": 10, "f": 0.5}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "f": 3}, 5, [], "x"]
)
def test_a_rows_broken_band_does_nothing_and_is_named(bad):
    block = {"profile_band": {"enabled": True, "defaults": {"total": BAND}}}
    outcome = apply({}, sized(1.0, 30, 5), row={"profile_band": {"total": bad}}, **block)
    assert totals(outcome) == [1.0]
    assert "profile_band.total of the row" in outcome.warnings[0].message


def test_a_band_scales_what_the_additive_rules_left():
    row = {"profile_band": {"total": BAND}}
    rules = {"profile_band_total": True, "longest_total_penalty": 0.5}
    samples = (sized(1.0, 1, 1), sized(1.0, 20, 20))
    assert totals(apply(rules, *samples, row=row)) == [1.0, 0.25]
    wiped = apply({**rules, "longest_total_penalty": 2.0}, *samples, row=row)
    assert totals(wiped) == [1.0, 0.0]


# The gate


GATED = {"group_total_length_penalty_coeff": 0.2, "group_length_penalty_profile_gate": True}


@pytest.mark.parametrize(
    ("rules", "row", "reason", "is_open"),
    [
        ({}, {}, "missing_profile_limit", False),
        ({}, {"profile_band": {"reasoning": BAND}}, "missing_profile_limit", False),
        ({}, {"profile_band": {"total": {"b": 20, "f": 0.5}}}, "missing_profile_limit", False),
        ({}, {"profile_band": {"total": {"a": True}}}, "missing_profile_limit", False),
        ({}, {"profile_band": {"total": {"a": 10}}}, "mean_gt_limit", True),
        ({}, {"profile_band": {"total": BAND}}, "mean_gt_limit", True),
        ({}, {"profile_band": {"total": {**BAND, "a": 15}}}, "mean_le_limit", False),
        (
            {"group_length_penalty_profile_gate_field": "b"},
            {"profile_band": {"total": BAND}},
            "mean_le_limit",
            False,
        ),
        (
            {"group_length_penalty_profile_gate_channel": "answer"},
            {"profile_band": {"answer": {**BAND, "a": 4}}},
            "mean_gt_limit",
            True,
        ),
    ],
)
def test_the_gate_opens_only_for_groups_longer_than_their_profile(rules, row, reason, is_open):
    # Positive totals 10 and 20, answers 5 and 5.
    outcome = apply(
        {**GATED, **rules},
        sized(1.0, 5, 5),
        sized(1.0, 15, 5),
        sized(0.0, 400, 400),
        row=row,
        verbose=True,
    )
    assert (outcome.report.gate.reason, outcome.report.gate.open) == (reason, is_open)
    assert totals(outcome) == pytest.approx([1.1, 0.9, 0.0] if is_open else [1.0, 1.0, 0.0])


def test_the_gate_reads_the_bands_of_the_configuration_too():
    block = {"profile_band": {"enabled": True, "defaults": {"total": {"a": 5, "b": 99, "f": 1.0}}}}
    outcome = apply(GATED, sized(1.0, 5, 5), sized(1.0, 15, 5), **block)
    assert totals(outcome) == pytest.approx([1.1, 0.9])


def test_the_gate_may_average_wrong_rollouts_as_well():
    row = {"profile_band": {"total": {**BAND, "a": 15}}}
    samples = (sized(1.0, 5, 5), sized(1.0, 15, 5), sized(0.0, 400, 400))
    everybody = {"group_length_penalty_profile_gate_positive_only": False}
    assert totals(apply({**GATED, **everybody}, *samples, row=row)) == pytest.approx([1.1, 0.9, 0])
    assert totals(apply(GATED, *samples, row=row)) == [1.0, 1.0, 0.0]


def test_a_gate_with_nothing_to_average_is_closed():
    outcome = apply(GATED, sized(0.0, 50, 5), row={"profile_band": {"total": BAND}}, verbose=True)
    assert outcome.report.gate.reason == "no_lengths"


def test_an_unknown_channel_is_closed():
    decision = compare_with_limit("both", 5.0, [9.0])
    assert (decision.open, decision.reason) == (False, "unknown_channel")


def test_the_gate_holds_back_scaling_and_nothing_else():
    outcome = apply({**GATED, "total_bonus": 0.1}, sized(1.0, 5, 5), sized(1.0, 15, 5))
    assert totals(outcome) == [1.1, 1.0]


# What is known afterwards


def test_the_reward_before_the_rules_is_read_off_the_ledger():
    outcome = apply({"longest_total_penalty": 2.0}, sized(1.0, 1, 1), sized(1.0, 5, 5))
    assert [env_reward(sample.reward) for sample in outcome.trajectories] == [1.0, 1.0]
    assert env_reward(Reward(1.0).adjusted("effort", 1.5)) == 1.5
    assert env_reward(Reward(0.5)) == 0.5


def test_metrics_are_means_over_rollouts():
    outcome = apply(
        {"longest_total_penalty": 2.0},
        sized(1.0, 1, 1),
        sized(1.0, 5, 5),
        sized(0.0, 1, 1),
        sized(0.0, 1, 1),
    )
    assert outcome.stats.scalars() == {
        "length_penalty/env_reward_mean": 0.5,
        "length_penalty/reward_delta_mean": -0.25,
        "length_penalty/wiped_correct_frac": 0.25,
        "length_penalty/adjusted_frac": 0.25,
        "length_penalty/skipped_non_binary_frac": 0.0,
    }


def test_a_report_is_kept_only_when_verbose():
    assert apply({"total_bonus": 0.5}, sized(1.0, 2, 3)).report is None
    report = apply({"total_bonus": 0.5, **GATED}, sized(1.0, 2, 3), verbose=True).report
    assert report.lines() == [
        "length_penalty agent=agent gate=closed reason=missing_profile_limit mean=None limit=None",
        "  [0] reasoning=2 answer=3 reward=1.0000 -> 1.5000 total_bonus=+0.5000",
    ]
    skipped = apply({}, sized(0.5, 2, 3), verbose=True).report
    assert skipped.lines() == ["length_penalty agent=agent skipped: non_binary"]


def test_odd_metadata_never_raises():
    for odd in (None, 5, "x", [], {}, [None], {"total": None}, {"total": [1]}, True):
        body = {"profile_band": odd, "profiled_rewards": odd, "profiled_output_lengths": odd}
        profile = read_profile(RowBody(json.dumps(body).encode()), {})
        assert profile.band("total") is None
        assert profile.passing == ()
