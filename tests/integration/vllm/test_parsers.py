"""Tool and reasoning parsers of vLLM's registries, behind the server's own chat format."""

import pytest

from gymrl.config import GenerationConfig
from gymrl.errors import ConfigError
from gymrl.generation.chat import ChatFormat
from gymrl.generation.findings import would_break
from gymrl.generation.parsing import ParsedText, ToolCall
from gymrl.generation.template_check import check_template
from gymrl.testing import build_tiny_tokenizer

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
CODER = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) }}
{{- ' Answer with <tool_call>\\n<function=name>...' + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value | string) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CALL = """\
Let me see.
<tool_call>
<function=look>
<parameter=city>
Zürich
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""


def test_calls_of_a_form_that_vllm_alone_reads_are_found_by_the_template_and_typed_by_the_tools():
    chat = ChatFormat(build_tiny_tokenizer(CODER))
    assert chat.tool_parser == "qwen3_coder"
    parsed = chat.parse(CALL, [LOOK])
    assert parsed.tool_calls == (ToolCall("look", '{"city": "Zürich", "days": 3}'),)
    assert parsed.content.strip() == "Let me see."
    assert chat.parse(CALL).tool_calls == ()
    assert not would_break(check_template(chat, uses=["turns", "tools"]))


def test_a_text_without_a_call_and_one_that_breaks_off_stay_as_they_are():
    chat = ChatFormat(build_tiny_tokenizer(CODER))
    for text in ("It is cold.", "a <tool_call>\n<function", ""):
        assert chat.parse(text, [LOOK]) == ParsedText(text)


def test_special_tokens_that_a_parser_reads_are_left_in_the_text_and_ends_of_turns_are_not():
    tokenizer = build_tiny_tokenizer(CODER)
    marks = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]
    marks += ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    chat = ChatFormat(tokenizer, tool_parser="kimi_k2")
    made = f'ok{marks[0]}{marks[2]}functions.look:0{marks[3]}{{"city": "b"}}{marks[4]}{marks[1]}'
    sampled = chat.encode(made + "<|im_end|>")

    parsed = chat.parse(chat.decode(sampled), [LOOK])

    assert parsed == ParsedText("ok", None, (ToolCall("look", '{"city": "b"}'),))


def test_reasoning_is_taken_out_by_a_parser_of_vllms():
    tokenizer = build_tiny_tokenizer(CODER)
    chat = ChatFormat(tokenizer, tool_parser="none", reasoning_parser="deepseek_r1")
    parsed = chat.parse("<think>cold</think>yes")
    assert (parsed.reasoning, parsed.content) == ("cold", "yes")


@pytest.mark.parametrize(
    ("setting", "name", "said"),
    [
        (
            "tool_parser",
            "qwen3_codr",
            "'qwen3_codr': ours are hermes, llama_json and none; those of",
        ),
        ("reasoning_parser", "thunk", "deepseek_r1"),
        ("tool_parser", "mistral", "does not fit the model's tokenizer"),
    ],
)
def test_a_parser_that_is_not_there_or_does_not_fit_is_told_at_the_start(setting, name, said):
    config = GenerationConfig(model="x", **{setting: name})
    with pytest.raises(ConfigError, match=said) as caught:
        ChatFormat.from_config(build_tiny_tokenizer(CODER), config)
    assert caught.value.setting == setting
