"""What was said, from requests and answers of every shape."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.viewer.conversation import TEXT_CHARS, Item, Part, Text, conversation_of

PNG = "data:image/png;base64,iVBORw0KGgo="


def said(item):
    return [part.text.text for part in item.parts if part.text]


def test_a_request_of_text_is_a_message_of_the_user():
    task = {"responses_create_params": {"input": "Hello"}}
    assert conversation_of(task, {}).items == (
        Item("message", (Part(text=Text("Hello", 5)),), role="user"),
    )


def test_instructions_come_first():
    task = {"responses_create_params": {"instructions": "Be kind.", "input": "Hello"}}
    assert [item.role for item in conversation_of(task, {}).items] == ["system", "user"]


def test_calls_results_and_reasoning_are_what_they_are():
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I add."}]},
        {"type": "function_call", "name": "add", "call_id": "c1", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "2"}]},
    ]
    items = conversation_of({}, {"response": {"output": output}}).items

    assert [(item.kind, said(item)) for item in items] == [
        ("reasoning", ["I add."]),
        ("call", ['{"a": 1}']),
        ("result", ["2"]),
        ("message", ["2"]),
    ]
    assert (items[1].name, items[1].call_id, items[2].call_id) == ("add", "c1", "c1")
    assert all(item.sampled for item in items)


def test_chat_messages_of_tools_are_results_and_their_calls_are_kept():
    given_input = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    call, result = conversation_of({"responses_create_params": {"input": given_input}}, {}).items

    assert '"add"' in said(call)[1]
    assert (result.kind, result.call_id, said(result)) == ("result", "c1", ["2"])


def test_an_image_is_numbered_once_and_a_link_is_not_fetched():
    content = [
        {"type": "input_image", "image_url": PNG},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "input_image", "image_url": "https://example.com/cat.png"},
    ]
    task = {"responses_create_params": {"input": [{"role": "user", "content": content}]}}
    found = conversation_of(task, {})

    assert found.images == (PNG,)
    assert [part.image for part in found.items[0].parts] == [0, 0, -1]
    assert found.items[0].parts[2].link == "https://example.com/cat.png"


def test_a_long_text_is_cut_and_says_so():
    task = {"responses_create_params": {"input": "x" * (TEXT_CHARS + 5)}}
    [part] = conversation_of(task, {}).items[0].parts
    assert (len(part.text.text), part.text.chars) == (TEXT_CHARS, TEXT_CHARS + 5)


def test_an_item_of_an_unknown_kind_keeps_its_json():
    entry = {"type": "computer_call", "action": {"x": 1}}
    [item] = conversation_of({}, {"response": {"output": [entry]}}).items
    assert item.kind == "computer_call"
    assert json.loads(said(item)[0]) == entry


NAMES = [
    *("type", "role", "content", "input", "output", "response", "text", "image_url", "url"),
    *("responses_create_params", "tool_calls", "summary", "name", "call_id", "arguments"),
]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=60)
@given(JSON, JSON)
def test_no_shape_of_request_or_answer_is_refused(given_input, output):
    task = {"responses_create_params": {"input": given_input}}
    found = conversation_of(task, {"response": {"output": output}})
    assert all(isinstance(item, Item) for item in found.items)
    assert conversation_of(given_input, output) is not None
