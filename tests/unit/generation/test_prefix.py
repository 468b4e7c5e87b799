import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gymrl.errors import GenerationRequestError, PrefixError
from gymrl.generation.chat import ChatFormat
from gymrl.generation.prefix import TruePrefix, splice
from gymrl.testing import build_tiny_tokenizer
from gymrl.testing.models import CHATML_TEMPLATE

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_NEWLINE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
# Only assistants' turns are closed, and what follows can merge with what comes before.
CLOSED_ASSISTANT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>\n\n"
    "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
# Reasoning of all but the last turn is dropped, as Qwen3 does.
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEVER_CLOSED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

END, NEWLINE, OTHER_END, USER = 2, 9, 3, 100
TEMPLATE_PREFIX = [USER, 5, END, NEWLINE, 50, 51, END, NEWLINE]
TEMPLATE = [*TEMPLATE_PREFIX, USER, 6, END, NEWLINE, 50]


def test_a_generation_that_ended_its_turn_is_followed_by_what_comes_after_it():
    prompt = splice(TruePrefix([USER, 5, END], [7, 8, END]), TEMPLATE, TEMPLATE_PREFIX, {END})
    assert prompt == [USER, 5, END, 7, 8, END, NEWLINE, USER, 6, END, NEWLINE, 50]


def test_a_generation_cut_by_length_is_closed_once():
    prompt = splice(TruePrefix([USER, 5, END], [7, 8]), TEMPLATE, TEMPLATE_PREFIX, {END})
    assert prompt == [USER, 5, END, 7, 8, END, NEWLINE, USER, 6, END, NEWLINE, 50]


def test_another_end_of_turn_token_takes_the_place_of_the_templates():
    prompt = splice(
        TruePrefix([USER, 5], [7, OTHER_END]), TEMPLATE, TEMPLATE_PREFIX, {END, OTHER_END}
    )
    assert prompt == [USER, 5, 7, OTHER_END, NEWLINE, USER, 6, END, NEWLINE, 50]


def test_a_stop_token_that_ends_no_turn_is_followed_by_the_end_of_turn():
    prompt = splice(TruePrefix([USER, 5], [7, NEWLINE]), TEMPLATE, TEMPLATE_PREFIX, {END})
    assert prompt == [USER, 5, 7, NEWLINE, END, NEWLINE, USER, 6, END, NEWLINE, 50]


def test_an_empty_generation_is_closed_even_when_the_prompt_ends_with_an_end():
    prompt = splice(TruePrefix([USER, 5, END], []), TEMPLATE, TEMPLATE_PREFIX, {END})
    assert prompt == [USER, 5, END, END, NEWLINE, USER, 6, END, NEWLINE, 50]


def test_rewritten_history_is_an_error_that_names_the_position():
    rewritten = [USER, 5, END, NEWLINE, 50, 99, 98, END, NEWLINE, USER]
    with pytest.raises(PrefixError, match="at token 5") as caught:
        splice(TruePrefix([USER], [7]), rewritten, TEMPLATE_PREFIX, {END})
    assert caught.value.position == 5
    assert caught.value.expected == [51, END, NEWLINE]
    assert caught.value.received == [99, 98, END, NEWLINE]


def test_history_that_became_shorter_is_an_error():
    with pytest.raises(PrefixError) as caught:
        splice(TruePrefix([USER], [7]), TEMPLATE_PREFIX[:5], TEMPLATE_PREFIX, {END})
    assert caught.value.position == 5


def test_a_conversation_that_does_not_go_on_is_an_error():
    whole = [*TEMPLATE_PREFIX[:7]]
    with pytest.raises(PrefixError, match="adds nothing"):
        splice(TruePrefix([USER], [7]), whole, TEMPLATE_PREFIX, {END})


def test_an_end_of_turn_of_an_earlier_message_is_not_taken_for_the_assistants():
    with pytest.raises(PrefixError, match="none of the end-of-turn tokens"):
        splice(TruePrefix([USER], [7]), [1, END, 50, 51, 6], [1, END, 50, 51], {END}, 2)


def test_what_follows_may_merge_with_text_after_the_end_of_turn():
    """The template's newline and the next message's first character can be one token."""
    prompt = splice(
        TruePrefix([USER, 5], [7, END]), [USER, 50, END, 77, 6], [USER, 50, END, NEWLINE], {END}
    )
    assert prompt == [USER, 5, 7, END, 77, 6]


def test_the_inputs_are_left_as_they_are():
    prefix = TruePrefix([USER, 5], [7])
    splice(prefix, TEMPLATE, TEMPLATE_PREFIX, {END})
    assert prefix == TruePrefix([USER, 5], [7])


CHATS = {
    name: ChatFormat(build_tiny_tokenizer(template))
    for name, template in {
        "chatml": CHATML_TEMPLATE,
        "smollm2": SMOLLM2,
        "no newline": NO_NEWLINE,
        "closed assistant": CLOSED_ASSISTANT,
    }.items()
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
WORDS = st.text(alphabet="abc \n<|im_end|>é日", max_size=12)
SAMPLED = st.lists(st.integers(3, 480), max_size=8)


@st.composite
def turns(draw):
    """What each turn samples, how it ends, and what comes next."""
    return draw(
        st.lists(
            st.tuples(SAMPLED, st.sampled_from([[2], [], [201]]), WORDS, st.booleans()),
            min_size=1,
            max_size=4,
        )
    )


@given(name=st.sampled_from(sorted(CHATS)), opening=WORDS, script=turns(), has_tools=st.booleans())
@settings(deadline=None, max_examples=50)
def test_over_a_whole_conversation_every_prompt_continues_the_true_tokens(
    name, opening, script, has_tools
):
    chat = CHATS[name]
    tools = TOOLS if has_tools else []
    messages = [{"role": "user", "content": opening}]
    prompt = chat.render(messages, tools)
    for sampled, ending, reply, is_tool in script:
        generated = [*sampled, *ending]
        messages.append({"role": "assistant", "content": chat.decode(generated)})
        place = len(messages) - 1
        role = "tool" if is_tool and has_tools else "user"
        messages.append({"role": role, "content": reply})
        truth = [*prompt, *generated]
        prompt = chat.continue_from(TruePrefix(prompt, generated), messages, place, tools)

        assert prompt[: len(truth)] == truth, "the true prefix is kept verbatim"
        assert len(prompt) > len(truth), "strictness"
        added = prompt[len(truth) :]
        whole = chat.render(messages, tools)
        assert whole[len(whole) - len(added) :] == added, "the rest is the template's"
        closing = truth[-1:] if generated[-1:] == [2] else added[:1]
        assert closing == [2], "the turn is closed"
        if generated[-1:] == [2]:
            upto = chat.render(messages[: place + 1], tools, add_generation_prompt=False)
            close = max(i for i, token_id in enumerate(upto) if token_id == 2)
            assert added == whole[close + 1 :], "no token is doubled or lost"


@given(name=st.sampled_from(sorted(CHATS)), opening=WORDS, answer=st.text("abc é", max_size=9))
@settings(deadline=None, max_examples=60)
def test_tokens_that_are_what_the_template_writes_give_the_templates_prompt(name, opening, answer):
    chat = CHATS[name]
    start = [{"role": "user", "content": opening}]
    messages = [
        *start,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "go on"},
    ]
    whole = chat.render(messages)
    prompt = chat.render(start)
    upto = chat.render(messages[:2], add_generation_prompt=False)
    close = max(i for i, token_id in enumerate(upto) if token_id == 2)
    # Otherwise the answer's first characters merged with the prompt's last.
    assume(upto[: len(prompt)] == prompt)
    prefix = TruePrefix(prompt, whole[len(prompt) : close + 1])
    assert chat.continue_from(prefix, messages, 1) == whole


def test_tokens_that_another_tokenisation_would_merge_are_kept(tiny_chat):
    """huggingface/trl#5224: decode then encode is no bijection."""
    prompt = tiny_chat.render([{"role": "user", "content": "hi"}])
    split = [token_id for letter in "hello world" for token_id in tiny_chat.encode(letter)]
    assert len(split) > len(tiny_chat.encode("hello world"))
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": tiny_chat.decode(split)},
        {"role": "user", "content": "and?"},
    ]
    following = tiny_chat.continue_from(TruePrefix(prompt, split), messages, 1)
    assert following[: len(prompt) + len(split)] == prompt + split


def test_a_template_that_drops_reasoning_is_an_error():
    """NVIDIA-NeMo/RL#3063: the template drops reasoning once the conversation goes on."""
    chat = ChatFormat(build_tiny_tokenizer(DROPS_REASONING))
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning_content": "hm", "content": "yes"},
        {"role": "user", "content": "and?"},
    ]
    prompt = chat.render(messages[:1])
    with pytest.raises(PrefixError, match="drop reasoning") as caught:
        chat.continue_from(TruePrefix(prompt, [5, 2]), messages, 1)
    assert caught.value.position == len(prompt)


# An empty block of reasoning is given to the last message alone, as Qwen3 does.
LAST_IS_DIFFERENT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("reasoning", [None, "hm"])
@pytest.mark.parametrize("replies", [1, 3])
def test_a_template_that_writes_its_last_message_differently_loses_nothing(reasoning, replies):
    """NVIDIA-NeMo/Gym#1787: every tool turn of such a model failed."""
    chat = ChatFormat(build_tiny_tokenizer(LAST_IS_DIFFERENT))
    answer = {"role": "assistant", "content": "look"}
    if reasoning:
        answer["reasoning_content"] = reasoning
    messages = [{"role": "user", "content": "hi"}, answer]
    messages += [{"role": "user", "content": f"reply {i}"} for i in range(replies)]
    prompt = chat.render(messages[:1])
    truth = [*prompt, 5, 6, 2]
    following = chat.continue_from(TruePrefix(prompt, [5, 6, 2]), messages, 1)
    assert following[: len(truth)] == truth
    tail = chat.tokenizer.decode(following[len(truth) :])
    expected = "".join(f"\n<|im_start|>user\nreply {i}<|im_end|>" for i in range(replies))
    assert tail == expected + "\n<|im_start|>assistant\n"


def test_a_template_that_refuses_a_conversation_without_a_user_still_continues():
    template = "{% if not messages|selectattr('role', 'equalto', 'user')|list %}"
    template += "{{ raise_exception('no user') }}{% endif %}" + NO_NEWLINE
    chat = ChatFormat(build_tiny_tokenizer(template))
    messages = [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "u"},
    ]
    with pytest.raises(GenerationRequestError, match="no user"):
        chat.continue_from(TruePrefix([5], [6, 2]), messages, 1)
    messages.insert(1, {"role": "user", "content": "u"})
    assert chat.continue_from(TruePrefix([5], [6, 2]), messages, 2)[:3] == [5, 6, 2]


def test_a_template_that_never_closes_a_turn_is_an_error():
    chat = ChatFormat(build_tiny_tokenizer(NEVER_CLOSED), end_ids=[2])
    messages = [{"role": r, "content": "x <|im_end|>"} for r in ("user", "assistant", "user")]
    messages[1]["content"] = "y"
    with pytest.raises(PrefixError, match="closes assistant turns"):
        chat.continue_from(TruePrefix([5], [6]), messages, 1)
