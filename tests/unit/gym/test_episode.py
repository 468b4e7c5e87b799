import json
from pathlib import Path

import numpy as np
import pytest

from gymrl.errors import (
    BadLogprobsError,
    GymSchemaError,
    NoGenerationError,
    NonContiguousTokensError,
    RewardContractError,
    RolloutDataFailure,
    RolloutInfraFailure,
)
from gymrl.gym.episode import EpisodeOptions, read_episode

CAPTURES = Path(__file__).parents[2] / "data" / "captures"


def turn(prompt, generation, logprobs=None, **fields):
    if logprobs is None:
        logprobs = [-0.5] * len(generation)
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "yes"}],
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": logprobs,
        **fields,
    }


def answer(*items, reward=1.0, incomplete=None, **extras):
    response = {"output": list(items), "incomplete_details": incomplete}
    return {"responses_create_params": {}, "response": response, "reward": reward, **extras}


def read(value, **keywords):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return read_episode(body, agent="agent", row=7, **keywords)


TWO_TURNS = (
    turn([1, 2], [3, 4], [-0.1, -0.2]),
    {"type": "function_call_output", "call_id": "c", "output": "{}"},
    turn([1, 2, 3, 4, 5], [6], [-0.3]),
)


def test_two_turns_become_one_sequence_with_each_token_once():
    trajectory = read(answer(*TWO_TURNS))
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert trajectory.token_ids.dtype == np.int32
    expected = np.array([0, 0, -0.1, -0.2, 0, -0.3], dtype=np.float32)
    assert trajectory.logprobs.tolist() == expected.tolist()
    spans = [(t.start, t.generation_start, t.end) for t in trajectory.turns]
    assert spans == [(0, 2, 4), (4, 5, 6)]
    assert trajectory.token_mask().tolist() == [False, False, True, True, False, True]
    assert trajectory.reward.verifier == 1.0
    assert trajectory.agent == "agent"
    assert not trajectory.placeholder
    assert not trajectory.truncated_prefix
    assert trajectory.notes == {}


def test_a_split_that_the_tokenizer_would_merge_is_kept_as_sampled():
    """huggingface/trl#5224: sampled ids are never encoded again from their text."""

    def decode(spans):
        return ["hello" for _ in spans]

    trajectory = read(answer(turn([9], [258, 385])), decode=decode)
    assert trajectory.token_ids.tolist() == [9, 258, 385]
    assert trajectory.turns[0].generation_text == "hello"


def test_a_prompt_that_differs_from_what_was_sampled_names_turn_position_and_window():
    """NVIDIA-NeMo/RL#3063."""
    with pytest.raises(
        NonContiguousTokensError, match=r"row 7 \(agent 'agent'\), turn 1"
    ) as caught:
        read(answer(turn([1, 2], [3, 4]), turn([1, 2, 3, 9, 5], [6])))
    error = caught.value
    assert (error.row, error.turn, error.position) == (7, 1, 3)
    assert error.expected == [1, 2, 3, 4]
    assert error.received == [1, 2, 3, 9, 5]
    assert error.kind == "data"


def test_a_prompt_shorter_than_what_was_seen_is_broken_where_it_ends():
    with pytest.raises(NonContiguousTokensError) as caught:
        read(answer(turn([1, 2], [3, 4]), turn([1, 2, 3], [6])))
    assert caught.value.position == 3


def test_an_id_that_only_begins_like_the_sampled_one_is_no_prefix():
    with pytest.raises(NonContiguousTokensError) as caught:
        read(
            b'{"reward":1,"response":{"output":['
            b'{"prompt_token_ids":[1],"generation_token_ids":[12],"generation_log_probs":[0.0]},'
            b'{"prompt_token_ids":[1,123],"generation_token_ids":[4],"generation_log_probs":[0.0]}'
            b"]}}"
        )
    assert caught.value.position == 1


def test_truncate_keeps_the_turns_before_the_break_with_the_reward():
    options = EpisodeOptions(on_broken_prefix="truncate")
    broken = answer(turn([1, 2], [3, 4]), turn([1, 2, 3, 9, 5], [6]), reward=0.25)
    trajectory = read(broken, options=options)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4]
    assert trajectory.truncated_prefix
    assert trajectory.reward.verifier == 0.25


def test_items_without_token_ids_are_no_turns():
    items = (
        {"type": "reasoning", "summary": []},
        turn([1], [2]),
        {"type": "message", "generation_token_ids": None, "prompt_token_ids": None},
    )
    assert len(read(answer(*items)).turns) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        {"type": "function_call", "name": "f", "arguments": "{}", "content": None},
    ],
)
def test_reasoning_and_function_calls_with_token_ids_are_turns(fields):
    assert len(read(answer(turn([1], [2], **fields))).turns) == 1


@pytest.mark.parametrize(
    ("logprobs", "position", "text"),
    [
        ([-0.1, -0.2], 2, "2 for 3 sampled tokens"),
        ([-0.1, -0.2, -0.3, -0.4], 3, "4 for 3"),
        ([-0.1, None, -0.3], 1, "element 1 is null"),
        ([-0.1, "x", -0.3], 1, "element 1"),
        ([-0.1, True, -0.3], 1, "element 1 is true"),
        ([-0.1, -0.3, -1e39], 2, "element 2"),
        ([-0.1, -(10**400), -0.3], 1, "element 1 is -1000"),
        (None, None, "absent, for 3"),
        ({}, None, "not a list"),
    ],
)
def test_bad_logprobs_name_turn_and_position(logprobs, position, text):
    """NVIDIA-NeMo/RL#4080."""
    item = turn([1], [5, 6, 7])
    item["generation_log_probs"] = logprobs
    with pytest.raises(BadLogprobsError, match=text) as caught:
        read(answer(item))
    assert (caught.value.turn, caught.value.position, caught.value.row) == (0, position, 7)


def test_absent_logprobs_are_bad_logprobs():
    item = turn([1], [5])
    del item["generation_log_probs"]
    with pytest.raises(BadLogprobsError, match="absent"):
        read(answer(item))


@pytest.mark.parametrize("spelled", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"null"])
def test_nonfinite_logprobs_are_refused_and_never_become_zero(spelled):
    """NVIDIA-NeMo/RL#2962."""
    body = json.dumps(answer(turn([1], [5, 6], [-0.1, -0.125]))).encode()
    with pytest.raises(BadLogprobsError) as caught:
        read(body.replace(b"-0.125", spelled))
    assert caught.value.position == 1


def test_the_engines_stand_in_for_probability_zero_is_a_number():
    trajectory = read(answer(turn([1], [5], [-9999.0])))
    assert trajectory.logprobs.tolist() == [0.0, -9999.0]


@pytest.mark.parametrize("bad", [[1.0], [None], [True], [-1], [2**31], [2**70], ["1"], "1", {}])
def test_token_ids_are_integers_in_range_or_the_row_fails(bad):
    item = turn([1], [2], [-0.5])
    item["generation_token_ids"] = bad
    with pytest.raises(GymSchemaError, match="turn 0"):
        read(answer(item))
    item = turn(bad, [2], [-0.5])
    with pytest.raises(GymSchemaError, match="turn 0"):
        read(answer(item))


def test_generated_ids_without_the_prompts_name_what_is_missing():
    item = turn([1], [2])
    item["prompt_token_ids"] = None
    with pytest.raises(GymSchemaError, match="without prompt_token_ids"):
        read(answer(item))


CUT = {"reason": "max_output_tokens"}


def test_an_empty_generation_after_a_good_turn_leaves_the_good_turn_last():
    """vllm-project/vllm#525: empty text with finish_reason=length."""
    trajectory = read(answer(turn([1], [2]), turn([1, 2, 3], []), incomplete=CUT))
    assert trajectory.token_ids.tolist() == [1, 2]
    assert trajectory.incomplete_reason == "max_output_tokens"
    assert trajectory.notes == {"empty_generations": 1}
    assert not trajectory.placeholder


def test_only_an_empty_generation_cut_by_length_keeps_its_place_with_the_prompt():
    """NVIDIA-NeMo/RL#4001."""
    trajectory = read(answer(turn([1, 2, 3], []), incomplete=CUT, reward=0.0))
    assert trajectory.placeholder
    assert trajectory.token_ids.tolist() == [1, 2, 3]
    assert trajectory.num_generated == 0
    assert trajectory.token_mask().sum() == 0


def test_no_output_cut_by_length_keeps_its_place_with_one_token():
    trajectory = read(answer(incomplete=CUT))
    assert trajectory.placeholder
    assert trajectory.num_tokens == 1
    assert trajectory.token_mask().sum() == 0


def test_nothing_sampled_without_a_length_limit_explains_both_causes():
    with pytest.raises(NoGenerationError, match="prompt length: 3 tokens") as caught:
        read(answer(turn([1, 2, 3], [])))
    assert caught.value.prompt_length == 3
    assert "context" in str(caught.value)
    assert "return_token_id_information" in str(caught.value)


@pytest.mark.parametrize(
    "reward", [None, "1.0", True, False, [], {}, 10**400], ids=lambda value: repr(value)[:12]
)
def test_a_reward_that_is_no_finite_number_fails_the_row_and_is_never_zero(reward):
    """huggingface/trl#5902."""
    with pytest.raises(RewardContractError, match="reward is"):
        read(answer(*TWO_TURNS, reward=reward))


def test_a_missing_reward_fails_the_row():
    body = answer(*TWO_TURNS)
    del body["reward"]
    with pytest.raises(RewardContractError, match="reward is missing"):
        read(body)


@pytest.mark.parametrize("spelled", [b"NaN", b"Infinity", b"1e999"])
def test_a_nonfinite_reward_fails_the_row(spelled):
    body = json.dumps(answer(*TWO_TURNS, reward=0.75)).encode().replace(b"0.75", spelled)
    with pytest.raises(RewardContractError, match="reward is"):
        read(body)


def test_integers_are_rewards():
    assert read(answer(*TWO_TURNS, reward=1)).reward.verifier == 1.0


def test_components_are_kept_when_they_sum_to_the_reward():
    parts = {"correct": 1.0, "format": 0.1, "cost": -0.2}
    trajectory = read(answer(*TWO_TURNS, reward=0.9, reward_components=parts))
    assert trajectory.reward.components == parts
    assert trajectory.reward.verifier == 0.9


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"a": 0.5, "b": 0.4}, "sum to 0.9"),
        ({"a": None, "b": 1.0}, "reward_components.a is None"),
        ({"a": "1"}, "reward_components.a"),
        ({"a": True}, "reward_components.a"),
        ([1.0], "an object of numbers"),
    ],
)
def test_components_that_break_the_contract_fail_the_row(parts, text):
    with pytest.raises(RewardContractError, match=text):
        read(answer(*TWO_TURNS, reward=1.0, reward_components=parts))


@pytest.mark.parametrize(
    ("extras", "masked"),
    [
        ({}, False),
        ({"mask_sample": None}, False),
        ({"mask_sample": False}, False),
        ({"mask_sample": True}, True),
        ({"mask_sample": False, "instance_config": {"mask_sample": True}}, True),
        ({"instance_config": {"mask_sample": None}}, False),
        ({"instance_config": "text"}, False),
    ],
)
def test_either_mask_flag_masks(extras, masked):
    assert read(answer(*TWO_TURNS, **extras)).mask_sample is masked


def test_a_mask_flag_that_is_no_flag_fails_the_row():
    with pytest.raises(GymSchemaError, match="mask_sample is 'yes'"):
        read(answer(*TWO_TURNS, mask_sample="yes"))


OPTIONAL_FIELDS = [
    ("answer", "reward_components"),
    ("answer", "mask_sample"),
    ("answer", "instance_config"),
    ("answer", "agent_ref"),
    ("answer", "scorer_error"),
    ("answer", "failure_kind"),
    ("answer", "_ng_failure_class"),
    ("answer", "responses_create_params"),
    ("response", "metadata"),
    ("response", "tools"),
    ("response", "reasoning"),
    ("response", "usage"),
    ("response", "incomplete_details"),
    ("item", "content"),
    ("item", "summary"),
    ("item", "role"),
    ("item", "type"),
    ("item", "routed_experts"),
]


@pytest.mark.parametrize(("place", "name"), OPTIONAL_FIELDS)
def test_an_optional_field_that_is_present_and_null_reads_like_an_absent_one(place, name):
    """NVIDIA-NeMo/Gym#1096."""
    item = turn([1], [2])
    body = answer(item)
    {"answer": body, "response": body["response"], "item": item}[place][name] = None
    assert read(body).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("details", ["length", 3, [], {"reason": 4}, {}, {"reason": None}])
def test_malformed_incomplete_details_are_no_truncation(details):
    assert read(answer(*TWO_TURNS, incomplete=details)).incomplete_reason is None


@pytest.mark.parametrize(
    "body",
    [
        {"reward": 1.0},
        {"reward": 1.0, "response": None},
        {"reward": 1.0, "response": "text"},
        {"reward": 1.0, "response": {"output": "text"}},
        {"reward": 1.0, "response": {"output": [None]}},
        [1],
        b"",
        b"<html>busy</html>",
        b'{"reward": 1.0, "resp',
    ],
)
def test_an_answer_of_another_shape_is_a_typed_failure(body):
    with pytest.raises(GymSchemaError):
        read(body)


def test_a_wrong_type_deep_inside_is_named_by_its_path():
    with pytest.raises(GymSchemaError) as caught:
        read(answer(turn([1], [2]), 5))
    assert caught.value.path == "$.response.output[1]"


def test_half_a_surrogate_pair_is_replaced_and_counted():
    body = json.dumps(answer(*TWO_TURNS, tool="a\ud800b \U0001f600 \\ud800 \udc00")).encode()
    trajectory = read(body)
    assert trajectory.notes == {"replaced_surrogates": 2}
    assert json.loads(trajectory.result)["tool"] == "a\ufffdb \U0001f600 \\ud800 \ufffd"


def test_bytes_that_are_not_utf8_are_replaced_and_counted():
    body = json.dumps(answer(*TWO_TURNS, tool="here")).encode().replace(b"here", b"\xff\xfe")
    trajectory = read(body)
    assert trajectory.notes == {"replaced_bytes": 2}
    assert json.loads(trajectory.result)["tool"] == "\ufffd\ufffd"


@pytest.mark.parametrize("text", ["\x00", "a\r\nb", "𠀀 💡", "\ufeff"])
def test_odd_but_sound_text_comes_back_as_it_was(text):
    for body in (
        json.dumps(answer(*TWO_TURNS, tool=text)).encode(),
        json.dumps(answer(*TWO_TURNS, tool=text), ensure_ascii=False).encode(),
    ):
        trajectory = read(body)
        assert trajectory.notes == {}
        assert json.loads(trajectory.result)["tool"] == text


def test_a_byte_order_mark_before_the_answer_is_dropped():
    body = b"\xef\xbb\xbf" + json.dumps(answer(*TWO_TURNS)).encode()
    assert read(body).result.startswith(b"{")


def test_bare_nan_in_the_verifiers_extras_reads_as_null_and_is_counted():
    body = json.dumps(answer(*TWO_TURNS, score=float("nan"), text="NaN")).encode()
    trajectory = read(body)
    assert trajectory.notes == {"replaced_nonfinite": 1}
    result = json.loads(trajectory.result)
    assert result["score"] is None
    assert result["text"] == "NaN"


def test_an_integer_beyond_64_bits_in_the_extras_survives():
    trajectory = read(answer(*TWO_TURNS, big=2**70))
    assert json.loads(trajectory.result)["big"] == 2**70


def test_nesting_beyond_reading_is_a_failure_that_names_the_path():
    deep = b"[" * 100_000 + b"]" * 100_000
    body = json.dumps(answer(*TWO_TURNS, trace={"steps": "here"})).encode()
    with pytest.raises(GymSchemaError, match=r"nests too deeply.*\$\.trace\.steps\[0\]") as caught:
        read(body.replace(b'"here"', deep))
    assert caught.value.path.startswith("$.trace.steps[0][0]")


def test_the_result_keeps_the_verifiers_fields_byte_for_byte_and_loses_the_token_fields():
    body = (
        b'{"reward": 1.0, "x" : {"b": 1.50, "a":[1e5, "\\u00e9"]} ,"response":{"output":[ '
        b'{ "prompt_token_ids" : [1, 2], "type":"message","generation_token_ids":[3],'
        b' "generation_log_probs":[-0.1] },{"call_id":"c"},'
        b'{"prompt_token_ids":[1,2,3],"generation_token_ids":[4],"generation_log_probs":[-1]}'
        b'] , "id":"r"}}'
    )
    assert read(body).result == (
        b'{"reward": 1.0, "x" : {"b": 1.50, "a":[1e5, "\\u00e9"]} ,"response":{"output":[ '
        b'{ "type":"message"},{"call_id":"c"},{}'
        b'] , "id":"r"}}'
    )


def test_a_key_spelled_with_escapes_is_cut_as_well():
    body = json.dumps(answer(turn([1], [2]))).encode()
    body = body.replace(b'"prompt_token_ids"', b'"prompt\\u005ftoken_ids"')
    assert b"token_ids" not in read(body).result


def test_a_scorer_error_is_counted():
    assert read(answer(*TWO_TURNS, scorer_error="ValueError: x")).notes == {"scorer_error": 1}


@pytest.mark.parametrize(
    ("terminal", "error"),
    [
        (True, RolloutDataFailure),
        (False, RolloutInfraFailure),
        (None, RolloutInfraFailure),
    ],
)
def test_a_failure_that_the_environment_reports_with_200_is_no_reward_of_zero(terminal, error):
    body = answer(
        reward=0.0,
        _ng_failure_class="sandbox_failed",
        _ng_failure_terminal=terminal,
        _ng_failure_message="no space left",
    )
    with pytest.raises(error, match=r"sandbox_failed.*no space left"):
        read(body)


def test_tool_calls_in_text_and_thinking_in_the_answer_are_flagged_per_turn():
    items = (
        turn([1], [2], content=[{"text": "<tool_call>{}</tool_call>"}]),
        turn([1, 2], [3], content="fine </think>"),
        turn([1, 2, 3], [4]),
    )
    flags = [(t.is_invalid_tool_call, t.has_malformed_thinking) for t in read(answer(*items)).turns]
    assert flags == [(True, False), (False, True), (False, False)]


def test_texts_are_decoded_in_one_batch():
    calls = []

    def decode(spans):
        calls.append(spans)
        return [" ".join(map(str, span)) for span in spans]

    trajectory = read(answer(*TWO_TURNS), decode=decode)
    assert calls == [[[1, 2], [3, 4], [5], [6]]]
    assert [t.prompt_text for t in trajectory.turns] == ["1 2", "5"]
    assert [t.generation_text for t in trajectory.turns] == ["3 4", "6"]


def test_the_captured_multi_reward_answer_of_a_real_server_is_read_up_to_its_broken_prefix():
    """The recorded peer's model repeats its first prompt, which is a broken prefix."""
    path = CAPTURES / "v07_multi" / "client_example_tool_call_multireward.json"
    body = json.dumps(json.loads(path.read_text())[0]["resp_body"]).encode()
    with pytest.raises(NonContiguousTokensError):
        read(body)
    trajectory = read(body, options=EpisodeOptions(on_broken_prefix="truncate"))
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 1000, 1001, 1002, 1003, 1004]
    assert trajectory.reward.components
    assert sum(trajectory.reward.components.values()) == trajectory.reward.verifier


def test_a_captured_answer_without_token_ids_says_what_the_model_server_lacks():
    recorded = json.loads((CAPTURES / "v07_openai_model" / "client.json").read_text())
    body = next(r["resp_body"] for r in recorded if r["url"].endswith("/run"))
    with pytest.raises(NoGenerationError, match="return_token_id_information"):
        read(body)


def test_where_tokens_are_not_required_an_answer_without_them_keeps_its_reward_and_usage():
    recorded = json.loads((CAPTURES / "v07_openai_model" / "client.json").read_text())
    body = next(r["resp_body"] for r in recorded if r["url"].endswith("/run"))
    trajectory = read(body, options=EpisodeOptions(require_tokens=False))
    assert trajectory.placeholder
    assert trajectory.reward.verifier == json.loads(trajectory.result)["reward"]
    assert trajectory.num_generated == 0
    assert "output_tokens" in json.loads(trajectory.result)["response"]["usage"]
