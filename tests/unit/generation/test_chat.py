import copy
import json

import pytest

from gymrl.errors import GenerationRequestError
from gymrl.generation.chat import ChatFormat
from gymrl.generation.parsers import tool_parser_of
from gymrl.generation.parsing import ParsedText, ToolCall
from gymrl.generation.template_messages import arguments_mapping
from gymrl.testing import build_tiny_tokenizer

IGNORES_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ITERATES_ARGUMENTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }},{% endfor %}){% endfor %}"
    "<|im_end|>\n{% endfor %}{{ tools or '' }}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "look outside",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def conversation(arguments) -> list[dict]:
    function = {"name": "weather", "arguments": arguments}
    if arguments is ...:
        del function["arguments"]
    return [
        {"role": "user", "content": "how is it in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "cold", "tool_call_id": "c1"},
    ]


def text(chat: ChatFormat, messages, tools=(), **variables) -> str:
    return chat.tokenizer.decode(chat.render(messages, tools, **variables))


def test_ids_are_those_that_transformers_gives(tiny_chat):
    messages = [{"role": "system", "content": "be 日本 kind"}, {"role": "user", "content": "a 1"}]
    expected = tiny_chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tiny_chat.render(messages) == list(expected["input_ids"])


def test_a_template_with_tools_shows_them(tiny_chat):
    assert tiny_chat.template_has_tools
    assert '"name": "weather"' in text(tiny_chat, [{"role": "user", "content": "hi"}], [WEATHER])


def test_a_template_without_tools_gets_them_in_a_system_message():
    chat = ChatFormat(build_tiny_tokenizer(IGNORES_TOOLS))
    assert not chat.template_has_tools
    assert chat.tool_parser == "hermes"
    rendered = text(chat, [{"role": "user", "content": "hi"}], [WEATHER])
    assert rendered.startswith("<|im_start|>system\n# Tools")
    assert json.dumps(WEATHER) in rendered
    assert "<tool_call>" in rendered


def test_the_tools_are_added_to_a_system_message_that_is_there():
    chat = ChatFormat(build_tiny_tokenizer(IGNORES_TOOLS))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    rendered = text(chat, messages, [WEATHER])
    assert rendered.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert rendered.count("<|im_start|>system") == 1


def test_without_tools_nothing_is_added():
    chat = ChatFormat(build_tiny_tokenizer(IGNORES_TOOLS))
    assert "Tools" not in text(chat, [{"role": "user", "content": "hi"}])


def test_calls_and_answers_are_written_as_text_where_the_template_has_none():
    chat = ChatFormat(build_tiny_tokenizer(IGNORES_TOOLS))
    rendered = text(chat, conversation('{"city": "Paris"}'), [WEATHER])
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}' in rendered
    assert "<|im_start|>user\n<tool_response>\ncold\n</tool_response><|im_end|>" in rendered
    assert "None" not in rendered


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Paris"}', "weather(city=Paris,)"),
        ({"city": "Paris"}, "weather(city=Paris,)"),
        ("null", "weather()"),
        ("", "weather()"),
        (None, "weather()"),
        (..., "weather()"),
        ("[1]", "weather(arguments=[1],)"),
        ("{bad", "weather(arguments={bad,)"),
        ("你好!", "weather(arguments=你好!,)"),
    ],
)
def test_arguments_are_mappings_for_the_template_whatever_came_over_the_wire(arguments, shown):
    """QwenLM/Qwen3#1894: "Can only get item pairs from a mapping"."""
    chat = ChatFormat(build_tiny_tokenizer(ITERATES_ARGUMENTS))
    messages = conversation(arguments)
    before = copy.deepcopy(messages)
    assert shown in text(chat, messages, [WEATHER])
    assert messages == before, "the caller's messages are left as they are"


def test_arguments_nested_too_deep_to_decode_are_shown_as_text():
    deep = "[" * 100_000
    assert arguments_mapping(deep) == {"arguments": deep}


def test_an_empty_conversation_is_refused(tiny_chat):
    with pytest.raises(GenerationRequestError, match="no message"):
        tiny_chat.render([])


def test_a_template_that_refuses_a_conversation_says_why():
    template = "{{ raise_exception('roles must alternate') }}" + IGNORES_TOOLS
    chat = ChatFormat(build_tiny_tokenizer(template), end_ids=[2])
    with pytest.raises(GenerationRequestError, match="roles must alternate"):
        chat.render([{"role": "user", "content": "hi"}])


def test_template_variables_reach_the_template():
    chat = ChatFormat(build_tiny_tokenizer(IGNORES_TOOLS + "{{ mood or 'calm' }}"))
    messages = [{"role": "user", "content": "hi"}]
    assert text(chat, messages).endswith("calm")
    assert text(chat, messages, template_kwargs={"mood": "wild"}).endswith("wild")


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(GenerationRequestError, match="no chat template"):
        ChatFormat(tokenizer)


def test_the_templates_end_of_turn_token_is_read_off_it():
    tokenizer = build_tiny_tokenizer(IGNORES_TOOLS.replace("<|im_end|>", "<|endoftext|>"))
    assert ChatFormat(tokenizer, end_ids=[7]).end_ids == {0, tokenizer.eos_token_id, 7}


def test_a_generations_text_has_no_turn_markers_and_keeps_its_tags(tiny_chat):
    ids = tiny_chat.encode("<think>hm</think>yes<|im_end|>")
    assert tiny_chat.decode(ids) == "<think>hm</think>yes"


def test_calls_are_read_only_when_tools_were_offered(tiny_chat):
    made = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    offered = tiny_chat.parse(made, [WEATHER])
    assert offered == ParsedText("", None, (ToolCall("f", "{}"),))
    assert tiny_chat.parse(made) == ParsedText(made)


def test_parsers_can_be_turned_off(tiny_tokenizer):
    chat = ChatFormat(tiny_tokenizer, tool_parser="none", reasoning_parser="none")
    made = '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert chat.parse(made, [WEATHER]) == ParsedText(made)


def test_reasoning_that_the_prompt_left_open_is_noticed(tiny_chat):
    assert tiny_chat.leaves_reasoning_open(tiny_chat.encode("assistant\n<think>\n"))
    assert not tiny_chat.leaves_reasoning_open(tiny_chat.encode("assistant\n"))


@pytest.mark.parametrize(
    ("template", "with_vllm", "without"),
    [
        ("<tool_call>", "hermes", "hermes"),
        ("<|python_tag|>", "llama_json", "llama_json"),
        ("nothing of the kind", "none", "none"),
        # Forms that look like hermes and are not.
        ("<tool_call>\n<function=name>", "qwen3_coder", "none"),
        ("<tool_call>name\n<arg_key>", "glm45", "none"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek_v31", "none"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c> ```json", "deepseek_v3", "none"),
    ],
)
def test_the_way_calls_are_written_is_read_off_the_template(template, with_vllm, without):
    assert tool_parser_of(template, has_tools=True, has_vllm=True) == with_vllm
    assert tool_parser_of(template, has_tools=True, has_vllm=False) == without
    assert tool_parser_of(template, has_tools=False, has_vllm=True) == "hermes"


def test_a_template_whose_calls_nobody_reads_has_no_parser():
    assert ChatFormat(build_tiny_tokenizer("{{ tools }}" + IGNORES_TOOLS)).tool_parser == "none"
