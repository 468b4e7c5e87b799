import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from gymrl.errors import PrefixError
from gymrl.generation.chat import ChatFormat
from gymrl.generation.findings import would_break
from gymrl.generation.prefix import TruePrefix
from gymrl.generation.template_check import check_template
from gymrl.recipes.tiny_model import word_tokenizer
from tests.unit.generation.template_families import (
    DEEPSEEK,
    FAMILIES,
    LLAMA31,
    QWEN3,
    SMOLLM2,
    deepseek_vocabulary,
    family,
    family_tokenizer,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def found(chat, check, **options):
    return [f for f in check_template(chat, **options) if f.check == check]


def test_qwen3s_template_rewrites_reasoning_once_the_user_speaks_again_and_says_where():
    chat = family("qwen3")
    (finding,) = found(chat, "reasoning, then another user turn")
    assert finding.severity == "break"
    assert "token_source='ledger'" in finding.remedy
    first = chat.render([{"role": "user", "content": "How cold is it?"}])
    assert finding.position == len(first)
    assert "<think>" in finding.found


def test_qwen3s_template_keeps_reasoning_in_a_loop_of_tools():
    (finding,) = found(family("qwen3"), "reasoning in a loop of tool calls")
    assert finding.severity == "ok"
    assert finding.found.startswith("extended")


def test_a_check_can_be_limited_to_what_the_run_does():
    findings = check_template(family("qwen3"), uses={"tools", "reasoning"})
    assert not would_break(findings)
    assert would_break(check_template(family("qwen3")))


@pytest.mark.parametrize("name", ["smollm2", "llama31", "deepseek"])
def test_the_other_families_break_nothing(name):
    findings = check_template(family(name))
    assert not would_break(findings), findings


def test_a_template_that_writes_answers_back_as_sampled_extends_them():
    (finding,) = found(family("smollm2"), "several user turns")
    assert (finding.severity, finding.position) == ("ok", None)


def test_a_template_that_trims_is_kept_by_the_splice():
    (finding,) = found(family("deepseek"), "several user turns")
    assert finding.severity == "ok"
    assert finding.found.startswith("kept")
    # The generation prompt opens reasoning, and history is written without it.
    prompt = family("deepseek").render([{"role": "user", "content": "How cold is it?"}])
    assert finding.position == len(prompt) - len(family("deepseek").encode("<think>\n"))


def test_a_model_that_does_not_stop_where_the_template_ends_a_turn_is_reported():
    chat = family("llama31")
    (eot,) = {chat.tokenizer.eos_token_id}
    (bad,) = found(chat, "end of turn", stop_ids=[eot + 1000])
    assert bad.severity == "break"
    assert f"add {eot} to eos_token_id" in bad.remedy
    (good,) = found(chat, "end of turn", stop_ids=[eot])
    assert good.severity == "ok"
    assert "<|eot_id|>" in good.found


def test_a_template_that_leaves_turns_open_is_reported():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    chat = ChatFormat(family_tokenizer("smollm2", template))
    (finding,) = found(chat, "end of turn")
    assert finding.severity == "break"


@pytest.mark.parametrize(
    ("template", "severity"),
    [("{{ bos_token }}" + LLAMA31, "break"), (LLAMA31, "ok"), (LLAMA31[16:], "ok")],
)
def test_a_beginning_of_text_token_that_is_written_twice_is_reported(template, severity):
    assert LLAMA31[:16] == "{{- bos_token }}"
    chat = ChatFormat(family_tokenizer("llama31", template))
    (finding,) = found(chat, "beginning of text")
    assert finding.severity == severity


@pytest.mark.parametrize(
    ("template", "severity", "said"),
    [(DEEPSEEK, "note", "twice"), (DEEPSEEK.replace("{{- bos_token }}", ""), "warn", "without")],
)
def test_a_tokenizer_that_adds_its_own_beginning_of_text_is_reported(template, severity, said):
    tokenizer = family_tokenizer("deepseek", template)
    from tokenizers.processors import TemplateProcessing

    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    (finding,) = found(ChatFormat(tokenizer), "beginning of text")
    assert finding.severity == severity
    assert said in finding.found


def test_a_template_without_tools_is_a_warning():
    findings = found(family("smollm2"), "tools")
    assert [f.severity for f in findings] == ["warn", "ok"]
    assert "told as text" in findings[1].found


def test_a_template_that_refuses_two_calls_in_a_turn_is_a_warning():
    findings = found(family("llama31"), "tools")
    assert [f.severity for f in findings] == ["warn", "ok"]
    assert "parallel_tool_calls" in findings[0].remedy
    assert "llama_json" in findings[1].found


def test_a_template_that_swallows_tool_answers_breaks_runs_with_tools():
    template = QWEN3.replace("{{- '\\n<tool_response>\\n' + message.content +", "{{- '\\n<x>' +")
    assert template != QWEN3
    (finding, *_) = found(ChatFormat(family_tokenizer("qwen3", template)), "tools")
    assert finding.severity == "break"
    assert "the tool's answer" in finding.found


def test_calls_that_no_parser_reads_break_runs_with_tools():
    chat = ChatFormat(family_tokenizer("qwen3"), tool_parser="none")
    assert [f.severity for f in found(chat, "tools")] == ["break"]
    assert not found(chat, "tools", uses={"turns"})


def test_a_tokenizer_that_loses_spaces_is_reported(caplog):
    tokenizer = family_tokenizer("smollm2")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "")
    chat = ChatFormat(tokenizer)
    assert "does not give texts back" in caplog.text
    (finding,) = found(chat, "text")
    assert finding.severity == "break"
    assert "tokenizer_class" in finding.remedy


def test_a_vocabulary_of_a_few_words_is_told_and_no_fault_of_the_tokenizer(caplog):
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} <eos>{% endfor %}"
    chat = ChatFormat(word_tokenizer(["user", "assistant", "say", "x"], template))
    (finding,) = found(chat, "text")
    assert finding.severity == "warn"
    assert not caplog.records


def test_a_generation_prompt_that_changes_what_is_before_it_is_reported():
    template = SMOLLM2.replace("Be helpful.", "Be {{ 1 if add_generation_prompt else 2 }}.")
    template = template.replace(
        "{{- '<|im_start|>system\\nBe {{ 1 if add_generation_prompt else 2 }}.<|im_end|>\\n' }}",
        "{{- '<|im_start|>system\\n' }}{{- 1 if add_generation_prompt else 2 }}{{- '<|im_end|>\\n' }}",
    )
    (finding,) = found(ChatFormat(family_tokenizer("smollm2", template)), "generation prompt")
    assert finding.severity == "warn"


texts = st.text(st.sampled_from("ab \n{}\u00e9\u96ea</think>"), min_size=1, max_size=12)


@st.composite
def conversations(draw, *, has_reasoning=False):
    """Steps of a rollout: what the model says (a text, or a call), and what comes after it."""
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        message = {"role": "assistant", "content": draw(texts).replace("</think>", "")}
        if has_reasoning and draw(st.booleans()):
            message["reasoning_content"] = draw(texts).replace("</think>", "") + "."
        after = [{"role": "user", "content": draw(texts)}]
        if draw(st.booleans()):
            arguments = json.dumps({"city": draw(texts)})
            message["content"] = ""
            message["tool_calls"] = [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "look", "arguments": arguments},
                }
            ]
            after = [{"role": "tool", "content": draw(texts), "tool_call_id": "c"}]
        steps.append((message, after))
    return steps


def play(chat, steps, sample):
    """Every prompt of the rollout, in order, with what is sampled after each."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    prompt = chat.render(messages, [TOOL])
    calls = []
    for message, after in steps:
        ids = sample(chat, message)
        calls.append((prompt, ids))
        place = len(messages)
        messages = [*messages, message, *after]
        sequence = [*prompt, *ids]
        prompt = chat.continue_from(TruePrefix(prompt, ids), messages, place, [TOOL])
        assert prompt[len(sequence) :] == written_after(chat, messages, place, ids)
    calls.append((prompt, []))
    return calls


def written_after(chat, messages, place, ids) -> list[int]:
    """What the template writes behind an answer, whatever the answer is."""
    plain = {"role": "assistant", "content": "QZQ"}
    if "tool_calls" in messages[place]:
        function = {"name": "look", "arguments": {"city": "QZQ"}}
        plain["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    text = chat.write([*messages[:place], plain, *messages[place + 1 :]], [TOOL])
    _, _, rest = text.rpartition("QZQ")
    closing = chat.tokenizer.convert_ids_to_tokens(min(chat.end_ids))
    is_closed = bool(ids) and ids[-1] in chat.end_ids
    end = rest.index(closing)
    return chat.encode(rest[end + len(closing) :] if is_closed else rest[end:])


def one_by_one(chat, message) -> list[int]:
    """A sample that spells its text a character a token, and ends its turn or not."""
    text = message["content"] + message.get("reasoning_content", "")
    ids = [token for character in text for token in chat.encode(character)]
    is_ended = len(text) % 3
    return [*ids, min(chat.end_ids)] if is_ended else ids


def assert_contiguous(chat, calls) -> None:
    for (prompt, ids), (following, _) in itertools.pairwise(calls):
        sequence = [*prompt, *ids]
        assert following[: len(sequence)] == sequence
        tail = following[len(sequence) :]
        is_closed = bool(ids) and ids[-1] in chat.end_ids
        assert (tail[0] in chat.end_ids) is not is_closed
        # Nothing is doubled: behind the close the template goes on.
        assert tail[1 if not is_closed else 0] not in chat.end_ids


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=20)
@given(conversations())
def test_every_family_continues_any_conversation_with_tools_on_the_sampled_tokens(name, steps):
    chat = family(name)
    assert_contiguous(chat, play(chat, steps, one_by_one))


@pytest.mark.parametrize("name", ["smollm2", "llama31", "deepseek"])
@settings(deadline=None, max_examples=25)
@given(conversations(has_reasoning=True))
def test_templates_that_know_no_reasoning_never_rewrite_it(name, steps):
    chat = family(name)
    assert_contiguous(chat, play(chat, steps, one_by_one))


@settings(deadline=None, max_examples=60)
@given(conversations(has_reasoning=True))
def test_qwen3_rewrites_exactly_where_a_user_speaks_after_reasoning(steps):
    chat = family("qwen3")
    # In a loop of tools reasoning stays; the next user's turn takes that of all turns before it.
    thoughts = [bool(message.get("reasoning_content", "").strip()) for message, _ in steps]
    asks = [after[0]["role"] == "user" for _, after in steps]
    is_rewritten = True in thoughts and True in asks[thoughts.index(True) :]
    if is_rewritten:
        with pytest.raises(PrefixError) as caught:
            play(chat, steps, one_by_one)
        assert caught.value.position is not None
    else:
        assert_contiguous(chat, play(chat, steps, one_by_one))


def test_an_answer_that_spells_an_end_of_turn_does_not_double_what_follows():
    chat = family("qwen3")
    user = {"role": "user", "content": "go"}
    answer = {"role": "assistant", "content": "a<|im_end|>b"}
    prompt = chat.render([user])
    sampled = [token for character in answer["content"] for token in chat.encode(character)]

    following = chat.continue_from(TruePrefix(prompt, sampled), [user, answer, user], 1)

    tail = "<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert following == [*prompt, *sampled, *chat.encode(tail)]


def test_reasoning_that_is_dropped_before_the_last_answer_is_rewriting_and_doubles_no_turn():
    chat = family("qwen3")
    user, answer = {"role": "user", "content": "go"}, {"role": "assistant", "content": "Cold."}
    function = {"name": "look", "arguments": "{}"}
    call = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I should look.",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    result = {"role": "tool", "content": "-7", "tool_call_id": "c"}
    prompt = chat.render([user, call, result], [TOOL])
    with pytest.raises(PrefixError, match="renders the history differently"):
        chat.continue_from(
            TruePrefix(prompt, chat.encode("Cold.")), [user, call, result, answer, user], 3, [TOOL]
        )


@settings(deadline=None, max_examples=25)
@given(conversations())
def test_deepseeks_own_vocabulary_continues_any_conversation(steps):
    chat = deepseek_vocabulary()
    assert_contiguous(chat, play(chat, steps, one_by_one))
    assert not would_break(check_template(chat, stop_ids=[chat.tokenizer.eos_token_id]))
