"""Long answers are decoded around their token lists; nothing else may differ."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import BadLogprobsError, GymSchemaError, RolloutDataFailure
from gymrl.gym.episode import read_episode
from gymrl.gym.lifting import lift_token_lists
from gymrl.gym.schema import LONG_BODY_BYTES
from gymrl.gym.tokens import TokenListError, parse_ids

IDS = list(range(1000, 1100))
LOGPROBS = [-0.25] * 100
FILLING = "x" * LONG_BODY_BYTES


def answer(**changes):
    item = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "yes"}],
        "prompt_token_ids": IDS,
        "generation_token_ids": IDS,
        "generation_log_probs": LOGPROBS,
        **changes.pop("item", {}),
    }
    return {"reward": 1.0, "response": {"output": [item]}, "filling": FILLING, **changes}


def encoded(value, indent=None, separators=None):
    return json.dumps(value, indent=indent, separators=separators).encode()


def expected_result(value):
    left = json.loads(json.dumps(value))
    for item in left["response"]["output"]:
        for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            item.pop(name, None)
    return left


@settings(deadline=None, max_examples=30)
@given(
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60),
    observed=st.lists(st.integers(0, 300), max_size=60),
    indent=st.sampled_from([None, 0, 1]),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
)
def test_a_long_answer_reads_like_a_short_one(ids, observed, indent, separators):
    first = {"prompt_token_ids": [*observed, 7], "generation_token_ids": ids}
    first["generation_log_probs"] = [-1.5] * len(ids)
    prompt = [*observed, 7, *ids, *observed]
    second = {"prompt_token_ids": prompt, "generation_token_ids": ids}
    second["generation_log_probs"] = [-2.5] * len(ids)
    short = {"reward": 1.0, "response": {"output": [first, second]}}
    long = {**short, "filling": FILLING}
    plain = read_episode(encoded(short, indent, separators), agent="a")
    lifted = read_episode(encoded(long, indent, separators), agent="a")
    assert lifted.token_ids.tolist() == plain.token_ids.tolist() == prompt + ids
    assert lifted.logprobs.tolist() == plain.logprobs.tolist()
    assert lifted.turns == plain.turns
    assert json.loads(lifted.result) == expected_result(long)


def test_token_lists_elsewhere_stay_in_the_result():
    value = answer(trace={"prompt_token_ids": IDS, "calls": [{"generation_log_probs": LOGPROBS}]})
    trajectory = read_episode(encoded(value), agent="a")
    assert json.loads(trajectory.result) == expected_result(value)


def test_text_that_looks_like_a_token_list_is_text():
    text = 'he wrote "prompt_token_ids": [' + "1, " * 50 + '1] and "generation_token_ids"'
    value = answer(note=text, **{"prompt_token_ids ": IDS}, list=["prompt_token_ids", IDS])
    value["response"]["output"][0]["content"][0]["text"] = text
    trajectory = read_episode(encoded(value), agent="a")
    assert trajectory.token_ids.tolist() == IDS + IDS
    assert json.loads(trajectory.result) == expected_result(value)


def test_the_result_keeps_its_spelling():
    body = encoded(answer(score=0)).replace(b'"score": 0', b'"score":  1.50')
    assert b'"score":  1.50' in read_episode(body, agent="a").result


def test_nothing_is_lifted_where_there_is_nothing_to_gain():
    assert lift_token_lists(b'{"prompt_token_ids": [1, 2]}') is None
    assert lift_token_lists(b'{"prompt_token_ids": null}') is None
    assert lift_token_lists(b'{"prompt_token_ids": [' + b"1," * 99) is None


def test_a_nan_in_a_long_answer_is_mended_and_refused_as_in_a_short_one():
    body = encoded(answer(item={"generation_log_probs": [float("nan"), *LOGPROBS[1:]]}))
    with pytest.raises(BadLogprobsError, match="element 0 is null"):
        read_episode(body, agent="a")
    body = encoded(answer(other=float("inf")))
    assert read_episode(body, agent="a").notes == {"replaced_nonfinite": 1}


BROKEN = [
    "1,,2",
    "1 2",
    "01",
    "1,2 3",
    "1,",
    ",1",
    "1, ,2",
    "1,02",
    "1, 02",
    "-1",
    "1.0",
    "x",
    '"1"',
]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("field", ["prompt_token_ids", "generation_token_ids"])
def test_a_list_that_is_broken_inside_is_refused(field, broken):
    for good in (b"[1000, 1001, ", b"[1000,1001,"):
        listed = encoded(answer()).replace(b"[1000, 1001, ", good)
        place = listed.index(field.encode())
        at = listed.index(good, place) + len(good)
        body = listed[:at] + broken.encode() + b", " + listed[at:]
        with pytest.raises((GymSchemaError, BadLogprobsError)):
            read_episode(body, agent="a")


@pytest.mark.parametrize("broken", ["1,,2", "1 2", "01", "x", "1,]", "[1", "nan"])
def test_log_probabilities_that_are_broken_inside_are_refused(broken):
    body = encoded(answer()).replace(b"[-0.25, ", f"[{broken}, ".encode(), 1)
    with pytest.raises(RolloutDataFailure):
        read_episode(body, agent="a")


def test_a_list_that_is_broken_where_nobody_reads_it_is_refused_too():
    body = encoded(answer(trace={"prompt_token_ids": IDS}))
    at = body.rindex(b"[1000, ") + 7
    with pytest.raises(GymSchemaError, match="not JSON"):
        read_episode(body[:at] + b"1,,2, " + body[at:], agent="a")


@settings(deadline=None, max_examples=300)
@given(st.text("0012,, ,\n", max_size=12))
def test_ids_are_read_as_json_reads_them_or_refused(inner):
    text = f"[{inner}]"
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    if expected is None or any(number > 2**31 - 1 for number in expected):
        with pytest.raises(TokenListError):
            parse_ids(text.encode())
    else:
        assert parse_ids(text.encode()).tolist() == expected
