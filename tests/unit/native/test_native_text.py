import pytest

from gymrl.errors import PrefixError
from gymrl.rollout.native_text import ChatText, RawText
from gymrl.testing import build_tiny_tokenizer
from gymrl.testing.models import CHATML_TEMPLATE

DROPS_REASONING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}{{- '<think></think>' }}{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_tokenizer()


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, DROPS_REASONING])
def test_an_observation_follows_an_answer_that_closed_its_turn(template):
    tokenizer = build_tiny_tokenizer(template)
    text = ChatText.from_tokenizer(tokenizer)
    answer = ids(tokenizer, "hello<|im_end|>")

    added = text.encode_observation({"role": "environment", "content": "too low"}, answer)

    assert tokenizer.decode(answer + added) == (
        "hello<|im_end|>\n<|im_start|>user\ntoo low<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_end_of_turn_is_written_once_where_the_model_did_not(tokenizer):
    text = ChatText.from_tokenizer(tokenizer)
    answer = ids(tokenizer, "hello")

    added = text.encode_observation({"role": "user", "content": "go on"}, answer)

    assert tokenizer.decode(answer + added) == (
        "hello<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_prompt_is_rendered_up_to_where_the_model_goes_on(tokenizer):
    text = ChatText.from_tokenizer(tokenizer)

    prompt = text.encode_prompt([{"role": "environment", "content": "hello"}])

    assert tokenizer.decode(prompt) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_is_read_without_its_end_of_turn(tokenizer):
    text = ChatText.from_tokenizer(tokenizer)

    assert text.decode(ids(tokenizer, "The answer is 42.<|im_end|>")) == "The answer is 42."


def test_a_template_that_never_closes_a_turn_is_refused_by_name(tokenizer):
    open_ended = "{% for m in messages %}{{ m.content }} {% endfor %}"
    text = ChatText.from_tokenizer(build_tiny_tokenizer(open_ended))

    with pytest.raises(PrefixError, match="RawText"):
        text.encode_observation({"role": "user", "content": "x"}, [1])


def test_raw_text_is_contents_and_nothing_else(tokenizer):
    text = RawText(tokenizer)
    messages = [{"role": "user", "content": "hello "}, {"role": "user", "content": "world"}]

    assert text.encode_prompt(messages) == ids(tokenizer, "hello world")
    assert text.encode_observation({"role": "environment", "content": "go"}, []) == ids(
        tokenizer, "go"
    )
    assert text.decode(ids(tokenizer, "hello<|im_end|>")) == "hello"
