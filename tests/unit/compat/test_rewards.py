import copy

import pytest
import torch

from gymrl.compat.nemo_rl import (
    apply_reward_penalties,
    build_reward_component_columns,
    compute_reward_penalty_metrics,
    extract_reward_components,
    nemo_gym_rollout_hit_max_tokens,
    resolve_reward_penalty_config,
    validate_reward_components_match_scalar,
)
from gymrl.errors import ConfigError


def message(text):
    return {"type": "message", "role": "assistant", "content": [{"text": text}]}


def reasoning(text):
    return {"type": "reasoning", "summary": [{"text": text}]}


def result(*items, reward=1.0, prompt=(1, 2), generation=(3, 4), malformed=False):
    return {
        "full_result": {"reward": reward, "response": {"output": list(items)}},
        "message_log": [
            {"role": "user", "token_ids": list(prompt)},
            {
                "role": "assistant",
                "token_ids": torch.tensor(generation),
                "has_malformed_thinking": malformed,
            },
        ],
    }


class Letters:
    """Every text is one token, but for those of more than three letters."""

    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        return [len(text)] if len(text) <= 3 else [1, 2]


def rewards(results):
    return [one["full_result"]["reward"] for one in results]


def test_a_penalty_sets_the_reward_of_the_result_to_zero_in_place():
    results = [result(reasoning("so 4"), message(" so 4")), result(reasoning("so"), message("4"))]
    counts = apply_reward_penalties(results, {"penalize_duplicated_reasoning": True})
    assert rewards(results) == [0.0, 1.0]
    assert counts == {
        "duplicated_reasoning": 1,
        "empty_final_answer": 0,
        "unwanted_token": 0,
        "malformed_think_tag": 0,
    }


def test_penalties_that_are_off_change_nothing():
    results = [result(message(""))]
    before = copy.deepcopy(results[0]["full_result"])
    for config in (None, {}, {"penalize_empty_final_answer": False, "token_ids": None}):
        assert sum(apply_reward_penalties(results, config).values()) == 0
    assert results[0]["full_result"] == before


def test_a_penalty_speaks_once_for_a_row_and_each_is_counted():
    results = [result(message(" "), generation=(9, 9, 9), malformed=True)]
    config = {
        "penalize_empty_final_answer": True,
        "penalize_unwanted_tokens": True,
        "penalize_malformed_think_tag": True,
        "token_ids": {"unwanted": [9]},
    }
    counts = apply_reward_penalties(results, config)
    assert counts == {
        "duplicated_reasoning": 0,
        "empty_final_answer": 1,
        "unwanted_token": 1,
        "malformed_think_tag": 1,
    }
    assert rewards(results) == [0.0]


def test_unwanted_tokens_of_a_prompt_are_nobodys_fault():
    results = [result(message("4"), prompt=(9,), generation=(3,))]
    config = {"penalize_unwanted_tokens": True, "token_ids": {"unwanted": [9]}}
    assert apply_reward_penalties(results, config)["unwanted_token"] == 0


def test_unwanted_tokens_must_be_named():
    with pytest.raises(ConfigError, match=r"token_ids\.unwanted"):
        apply_reward_penalties([], {"penalize_unwanted_tokens": True})


def test_tag_ids_are_filled_in_where_each_tag_is_one_token():
    block = {"penalize_malformed_think_tag": True}
    resolved = resolve_reward_penalty_config(block, Letters(), ["<t>", "</"])
    assert resolved["token_ids"]["think_open"] == 3
    assert resolved["token_ids"]["think_close"] == 2
    assert resolved["thinking_tags"] == ["<t>", "</"]
    unresolved = resolve_reward_penalty_config(block, Letters(), ["<think>", "</"])
    assert "think_open" not in unresolved["token_ids"]
    assert resolve_reward_penalty_config(None, Letters()) is None


def test_ids_that_are_given_stay():
    block = {"penalize_malformed_think_tag": True, "token_ids": {"think_open": 7, "think_close": 8}}
    resolved = resolve_reward_penalty_config(block, Letters(), ["<t>", "</"])
    assert (resolved["token_ids"]["think_open"], resolved["token_ids"]["think_close"]) == (7, 8)
    # What comes back is read again as it is.
    assert resolve_reward_penalty_config(resolved, None) == resolved


def test_rates_are_those_of_the_penalties_that_are_on():
    counts = {"duplicated_reasoning": 1, "empty_final_answer": 3}
    config = {"penalize_duplicated_reasoning": True}
    assert compute_reward_penalty_metrics(counts, 4, config) == {
        "reasoning_equal_to_final_answer_rate": 0.25
    }
    assert compute_reward_penalty_metrics(counts, 0, config) == {}
    assert compute_reward_penalty_metrics(counts, 4, None) == {}


def test_components_are_read_or_there_are_none():
    assert extract_reward_components({"reward": 1.0}) is None
    assert extract_reward_components({"reward_components": {}}) is None
    assert extract_reward_components({"reward_components": {"a": 1, "b": 0.5}}) == {
        "a": 1.0,
        "b": 0.5,
    }
    with pytest.raises(ValueError, match=r"reward_components\.a is None"):
        extract_reward_components({"reward_components": {"a": None}})


def test_component_columns_are_the_union_of_names_sorted_and_filled_with_zero():
    columns = build_reward_component_columns([{"b": 1.0}, None, {"a": 0.5, "b": 2.0}])
    assert list(columns) == ["reward/a", "reward/b"]
    assert columns["reward/a"].tolist() == [0.0, 0.0, 0.5]
    assert columns["reward/b"].tolist() == [1.0, 0.0, 2.0]
    assert columns["reward/a"].dtype == torch.float32
    assert build_reward_component_columns([None, None]) == {}


def test_a_reward_that_is_not_the_sum_of_its_parts_is_named_by_its_row():
    good = {"reward": 0.3, "reward_components": {"a": 0.1, "b": 0.2}}
    validate_reward_components_match_scalar([good, {"reward": 5.0}, {}])
    bad = {"reward": 1.0, "reward_components": {"a": 0.1}}
    with pytest.raises(ValueError, match="row 1"):
        validate_reward_components_match_scalar([good, bad])
    with pytest.raises(ValueError, match="nan"):
        validate_reward_components_match_scalar(
            [{"reward": float("nan"), "reward_components": {"a": float("nan")}}]
        )


@pytest.mark.parametrize(
    ("full_result", "total", "expected"),
    [
        ({}, 8, True),
        ({}, 7, False),
        (None, 7, False),
        ({"response": {"incomplete_details": {"reason": "max_output_tokens"}}}, 1, True),
        ({"response": {"incomplete_details": {"reason": "content_filter"}}}, 1, False),
        ({"response": {"incomplete_details": None}}, 1, False),
        ({"response": "cut"}, 1, False),
        ({"response": {"incomplete_details": {"reason": ["length"]}}}, 1, False),
    ],
)
def test_truncation_is_the_limit_or_a_length_reason(full_result, total, expected):
    hit = nemo_gym_rollout_hit_max_tokens(
        full_result, total_tokens=total, max_total_tokens_per_sample=8
    )
    assert hit is expected
