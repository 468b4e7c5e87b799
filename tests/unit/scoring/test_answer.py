import json

import pytest

from gymrl.errors import GymSchemaError, RowValueError
from gymrl.scoring.answer import Answer, OutputItem, RowBody

ODD = [None, [], {}, "", "text", 5, 1.5, True, [None], [[]], {"a": None}]


def answer(value):
    return Answer(json.dumps(value).encode())


def prompt(given):
    return RowBody(json.dumps({"responses_create_params": {"input": given}}).encode())


def test_an_item_has_the_text_of_all_its_parts():
    read = answer(
        {
            "response": {
                "output": [
                    {"type": "reasoning", "summary": [{"text": "so "}, {"text": "far"}]},
                    {"type": "message", "role": "assistant", "content": [{"text": "a"}, "b"]},
                    {"type": "message", "content": "plain"},
                    {"type": "function_call", "arguments": "{}", "name": "f"},
                ]
            }
        }
    )
    assert read.items == (
        OutputItem("reasoning", None, "so far"),
        OutputItem("message", "assistant", "ab"),
        OutputItem("message", None, "plain"),
        OutputItem("function_call"),
    )


def test_a_reasoning_item_without_a_summary_has_the_text_of_its_content():
    item = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "t"}],
    }
    assert answer({"response": {"output": [item]}}).items[0].text == "t"


def test_a_refusal_is_a_text():
    item = {"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}
    assert answer({"response": {"output": [item]}}).items[0].text == "no"


def test_an_item_without_a_type_but_with_content_is_a_message():
    item = answer({"response": {"output": [{"content": "a"}]}}).items[0]
    assert item.kind == "message"
    assert item.is_model_message


def test_a_message_of_the_user_is_not_the_models():
    item = {"type": "message", "role": "user", "content": "observation"}
    assert not answer({"response": {"output": [item]}}).items[0].is_model_message


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_response_has_no_items(odd):
    read = answer({"response": odd})
    assert read.items == ()
    assert read.incomplete_reason is None


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_in_items_never_raise(odd):
    for item in ({"type": "message", "role": odd, "content": odd}, {"type": odd}, odd):
        read = answer({"response": {"output": [item], "incomplete_details": odd}})
        assert len(read.items) == 1
        assert isinstance(read.items[0].text, str)
        assert read.incomplete_reason is None


def test_an_item_that_is_no_object_keeps_its_place():
    read = answer({"response": {"output": [None, {"type": "message", "content": "a"}]}})
    assert [item.kind for item in read.items] == ["unknown", "message"]


def test_the_reason_of_an_incomplete_response_is_read():
    read = answer({"response": {"incomplete_details": {"reason": "max_output_tokens"}}})
    assert read.incomplete_reason == "max_output_tokens"


def test_scalars_are_booleans_and_finite_numbers_at_the_top_level():
    read = Answer(
        b'{"a": 1, "b": -2.5, "c": true, "d": false, "e": null, "f": "3", "g": [1], "h": {"i": 1},'
        b' "huge": 1e400, "big": 1' + b"0" * 400 + b"}"
    )
    assert read.scalars == {"a": 1.0, "b": -2.5, "c": 1.0, "d": 0.0}


def test_an_answer_that_is_no_object_names_itself():
    for body in (b"[]", b"null", b"{", b"", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        with pytest.raises(GymSchemaError, match=r"answer of /run"):
            Answer(body)


def test_a_body_that_is_no_object_names_the_row():
    with pytest.raises(RowValueError, match="row 7"):
        RowBody(b"[]", 7)


def test_the_prompt_is_the_last_user_message():
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "second"},
        {"role": "system", "content": "not this"},
    ]
    assert prompt(messages).last_user_text == "second"


def test_the_prompt_may_be_parts_or_a_plain_string():
    parts = [{"type": "input_text", "text": "be "}, {"type": "input_image"}, {"text": "brief"}]
    assert prompt([{"role": "user", "content": parts}]).last_user_text == "be brief"
    assert prompt("be brief").last_user_text == "be brief"


@pytest.mark.parametrize("odd", [o for o in ODD if not isinstance(o, str)])
def test_an_odd_prompt_is_empty(odd):
    assert prompt(odd).last_user_text == ""
    assert prompt([{"role": "user", "content": odd}, {"role": odd}]).last_user_text == ""
    body = RowBody(json.dumps({"responses_create_params": odd}).encode())
    assert body.last_user_text == ""
