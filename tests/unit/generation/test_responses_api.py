import json

import pytest

from gymrl.errors import GenerationRequestError
from gymrl.generation.base import Generated
from gymrl.generation.parsing import ParsedText, ToolCall
from gymrl.generation.policy import Completion
from gymrl.generation.prefix import TruePrefix
from gymrl.generation.requests import ResponsesRequest, convert
from gymrl.generation.responses_api import check_request, conversation_of, response_of

TOKENS = {
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3],
    "generation_log_probs": [-0.5],
}


def request(input_="hi", **fields) -> ResponsesRequest:
    return convert({"input": input_, **fields}, ResponsesRequest)


def completion(parsed: ParsedText, finish="stop") -> Completion:
    generated = Generated(token_ids=[7, 8], logprobs=[-0.1, -0.2], finish_reason=finish)
    return Completion(prompt_ids=[1, 2, 3], generated=generated, parsed=parsed)


def test_a_text_is_a_users_message():
    assert conversation_of(request("hi")).messages == [{"role": "user", "content": "hi"}]


def test_instructions_come_first_and_developers_speak_as_the_system():
    conversation = conversation_of(
        request([{"role": "developer", "content": "be kind"}], instructions="be brief")
    )
    assert conversation.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "be kind"},
    ]


def test_parts_are_joined():
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation_of(request([{"role": "user", "content": parts}])).messages == [
        {"role": "user", "content": "ab"}
    ]


def test_the_items_of_one_turn_become_one_message():
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "ok"}],
        },
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call", "name": "g", "arguments": '{"x":1}', "call_id": "c2", **TOKENS},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"text": "two"}]},
    ]
    conversation = conversation_of(request(items))
    assert conversation.messages == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "ok",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"x":1}'}},
            ],
        },
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
    ]
    assert conversation.prefixes == {1: TruePrefix([1, 2], [3])}


def test_an_item_with_tokens_ends_its_turn():
    items = [
        {"role": "assistant", "content": "a", **TOKENS},
        {"type": "function_call", "name": "f", "arguments": "{}", **TOKENS},
    ]
    conversation = conversation_of(request(items))
    assert len(conversation.messages) == 2
    assert conversation.prefixes == {1: TruePrefix([1, 2], [3])}


def test_of_the_items_that_carry_tokens_the_newest_is_read():
    """Every one carries all tokens before it: reading each was most of a long conversation's time."""
    items = [
        {"role": "assistant", "content": "a", **TOKENS, "prompt_token_ids": "not read"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", **TOKENS},
        {"role": "user", "content": "d"},
    ]
    assert conversation_of(request(items)).prefixes == {2: TruePrefix([1, 2], [3])}


@pytest.mark.parametrize(
    ("ids", "place", "said"),
    [
        ([1, "2"], "[1]", "Expected `int`, got `str`"),
        ([1, 2.5], "[1]", "Expected `int`, got `float`"),
        ("1, 2", "", "Expected `array`, got `str`"),
        ({"ids": [1]}, "", "Expected `array`, got `object`"),
    ],
)
def test_tokens_that_are_no_list_of_ids_are_refused_with_their_place(ids, place, said):
    asked = request([{"role": "assistant", "content": "a", **TOKENS, "generation_token_ids": ids}])
    with pytest.raises(GenerationRequestError) as caught:
        conversation_of(asked)
    assert caught.value.param == f"input[0].generation_token_ids{place}"
    assert str(caught.value) == f"{said} - at `$.{caught.value.param}`"


def test_two_answers_in_a_row_are_two_messages():
    items = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [m["content"] for m in conversation_of(request(items)).messages] == ["a", "b"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({}, "input[0].type"),
        ({"role": "wizard", "content": "x"}, "input[0].role"),
        ({"type": "function_call", "arguments": "{}"}, "input[0].name"),
        (
            {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
            "input[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": "x", **TOKENS}, "input[0].prompt_token_ids"),
        (
            {"role": "assistant", "content": "x", "prompt_token_ids": [1]},
            "input[0].generation_token_ids",
        ),
        (
            {"role": "assistant", "content": "x", "generation_token_ids": [1]},
            "input[0].prompt_token_ids",
        ),
        (
            {"role": "assistant", "prompt_token_ids": [], "generation_token_ids": []},
            "input[0].prompt_token_ids",
        ),
    ],
)
def test_a_malformed_item_is_refused_with_its_place(item, param):
    with pytest.raises(GenerationRequestError) as caught:
        conversation_of(request([item]))
    assert caught.value.param == param


def test_tools_are_shown_in_the_form_of_chat_templates():
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    conversation = conversation_of(request(tools=[tool]))
    assert conversation.tools == [
        {
            "type": "function",
            "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
        }
    ]
    assert conversation.may_call
    assert not conversation_of(request(tools=[tool], tool_choice="none")).may_call


@pytest.mark.parametrize(
    ("tool", "param"),
    [({"type": "web_search"}, "tools[0].type"), ({"type": "function"}, "tools[0].name")],
)
def test_a_tool_that_is_no_function_is_refused(tool, param):
    with pytest.raises(GenerationRequestError) as caught:
        conversation_of(request(tools=[tool]))
    assert caught.value.param == param


@pytest.mark.parametrize("field", [{"previous_response_id": "resp_1"}, {"background": True}])
def test_what_needs_state_between_calls_is_refused_by_name(field):
    with pytest.raises(GenerationRequestError) as caught:
        check_request(request(**field))
    assert caught.value.param == next(iter(field))


def test_an_answer_carries_its_tokens_on_the_last_item():
    parsed = ParsedText("see", "hm", (ToolCall("f", '{"x": 1}'), ToolCall("g", "{}")))
    answer = response_of(request(), completion(parsed), "policy")
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    for item in answer["output"][:-1]:
        assert "generation_token_ids" not in item
    last = answer["output"][-1]
    assert last["prompt_token_ids"] == [1, 2, 3]
    assert last["generation_token_ids"] == [7, 8]
    assert last["generation_log_probs"] == [-0.1, -0.2]
    assert json.loads(answer["output"][2]["arguments"]) == {"x": 1}
    assert answer["status"] == "completed"
    assert answer["usage"]["total_tokens"] == 5


def test_an_empty_generation_still_has_an_item_to_carry_the_tokens():
    answer = response_of(request(), completion(ParsedText("")), "policy")
    assert answer["output"][0]["content"][0]["text"] == ""
    assert answer["output"][0]["generation_token_ids"] == [7, 8]


def test_a_generation_cut_by_length_is_incomplete():
    answer = response_of(request(), completion(ParsedText("x"), "length"), "policy")
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_only_the_first_call_is_returned_when_parallel_calls_are_off():
    parsed = ParsedText("", None, (ToolCall("f", "{}"), ToolCall("g", "{}")))
    answer = response_of(request(parallel_tool_calls=False), completion(parsed), "policy")
    assert [item["name"] for item in answer["output"]] == ["f"]


def test_an_answer_can_be_sent_back_as_it_came():
    parsed = ParsedText("see", "hm", (ToolCall("f", "{}"),))
    answer = response_of(request(), completion(parsed), "policy")
    conversation = conversation_of(request([{"role": "user", "content": "hi"}, *answer["output"]]))
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"]
    assert conversation.prefixes == {1: TruePrefix([1, 2, 3], [7, 8])}
