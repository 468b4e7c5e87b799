import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.generation.parsing import (
    ToolCall,
    parse_hermes,
    parse_llama_json,
    split_reasoning,
)


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_call_is_read_and_taken_out_of_the_text():
    content, calls = parse_hermes("Let me see.\n" + call("weather", city="Paris"))
    assert content == "Let me see."
    assert calls == (ToolCall("weather", '{"city": "Paris"}'),)


def test_several_calls_keep_their_order():
    content, calls = parse_hermes(call("a", x=1) + "\n" + call("b", y=[2]))
    assert content == ""
    assert [c.name for c in calls] == ["a", "b"]


def test_text_without_calls_is_left_exactly_as_it_is():
    assert parse_hermes("  plain \n") == ("  plain \n", ())


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>\n\n</tool_call>",
        '<tool_call>{"arguments":{}}</tool_call>',
        '<tool_call>{"name":"a","arguments":{}}\n{"name":"b"}</tool_call>',
        '<tool_call>{"name":"a" "arguments":1}</tool_call>',
        '<tool_call>{"name":"a","arguments":{}}',
        '<tool_call>{"name":"a","arguments":null}</tool_call>',
        '<tool_call>{"name":"a","arguments":[]}</tool_call>',
        '<tool_call>{"name":"a","arguments":"x"}</tool_call>',
        '<tool_call>{"name":"a","arguments":3}</tool_call>',
        '<tool_call>{"name":"a","arguments":true}</tool_call>',
        '<tool_call>{"name":"a","arguments":"你好!"}</tool_call>',
        '<tool_call>{"name":"","arguments":{}}</tool_call>',
        '<tool_call>{"name":7,"arguments":{}}</tool_call>',
        "<tool_call>null</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "</tool_call>",
        "<tool_call>",
    ],
)
def test_what_is_no_call_stays_visible_as_text(block):
    """verl-project/verl#7177, lsdefine/GenericAgent#746, vllm-project/vllm#13078."""
    text = f"before {block} after"
    assert parse_hermes(text) == (text, ())


@pytest.mark.parametrize("parse", [parse_hermes, parse_llama_json])
def test_half_a_character_in_a_call_is_the_replacement_character(parse):
    """The model may write one, and the server could not encode its own answer: HTTP 500."""
    bare = '{"name": "f", "arguments": {"x": "a\\ud83d", "y": "\\ud83d\\ude42"}}'
    text = bare if parse is parse_llama_json else f"<tool_call>{bare}</tool_call>"
    _, (call_,) = parse(text)
    assert call_.arguments == '{"x": "a\ufffd", "y": "\U0001f642"}'


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("parse", [parse_hermes, parse_llama_json])
def test_arguments_that_would_be_no_json_stay_text(parse, number):
    """They were passed on as `Infinity`, which agents' JSON parsers refuse."""
    bare = f'{{"name": "f", "arguments": {{"x": {number}}}}}'
    text = bare if parse is parse_llama_json else f"<tool_call>{bare}</tool_call>"
    assert parse(text) == (text, ())


def test_a_good_call_is_read_beside_a_bad_one():
    content, calls = parse_hermes("<tool_call>oops</tool_call>" + call("a", x=1) + "<tool_call>")
    assert [c.name for c in calls] == ["a"]
    assert content == "<tool_call>oops</tool_call><tool_call>"


def test_a_call_after_an_unclosed_tag_is_read_and_the_tag_stays():
    content, calls = parse_hermes("<tool_call>\n" + call("a"))
    assert [c.name for c in calls] == ["a"]
    assert content == "<tool_call>"


@pytest.mark.parametrize("tail", ["", "</tool_call>"])
def test_hundred_thousand_unclosed_tags_take_linear_time(tail):
    """A quadratic scan over this would run into the test's time limit."""
    text = "<tool_call>" * 100_000 + tail
    assert parse_hermes(text) == (text, ())
    text = "</tool_call>" * 100_000
    assert parse_hermes(text) == (text, ())


def test_five_megabytes_of_arguments_are_read():
    big = "x" * 5_000_000
    _, calls = parse_hermes(call("a", text=big))
    assert len(calls[0].arguments) > 5_000_000


@given(st.text(alphabet='<>/_{}":,[]tolcaname arguments\n', max_size=200))
@settings(deadline=None, max_examples=100)
def test_no_text_makes_the_parsers_raise(text):
    content, calls = parse_hermes(text)
    assert calls or content == text
    parse_llama_json(text)
    split_reasoning(text)


def test_llama_calls_are_bare_json():
    text = '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}'
    assert parse_llama_json(text) == ("", (ToolCall("f", '{"x": 1}'), ToolCall("g", "{}")))
    assert parse_llama_json("<|python_tag|>" + text)[1] == parse_llama_json(text)[1]


@pytest.mark.parametrize(
    "text", ['{"name": "f"}', '{"name": "f", "parameters": {}} ok', "[1]", "hi"]
)
def test_llama_text_that_is_not_all_calls_is_text(text):
    assert parse_llama_json(text) == (text, ())


def test_reasoning_is_split_off():
    assert split_reasoning("<think>\nhm\n</think>\n\nyes") == ("hm", "yes")


def test_reasoning_that_the_prompt_opened_needs_only_its_end():
    assert split_reasoning("hm</think>yes", is_open=True) == ("hm", "yes")


def test_reasoning_that_was_cut_has_no_content():
    assert split_reasoning("<think>and then") == ("and then", "")


def test_text_without_tags_is_content():
    assert split_reasoning("  yes") == (None, "  yes")


def test_doubled_thinking_tags_stay_visible():
    """huggingface/trl#6361."""
    assert split_reasoning("<think></think>x</think>") == ("", "x</think>")
