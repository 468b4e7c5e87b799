import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import SamplingParams
from gymrl.generation.answer_stream import AnswerStream, TextStream
from gymrl.generation.chat import ChatFormat
from gymrl.generation.chat_api import choice_sampling
from gymrl.testing import build_tiny_tokenizer

CHAT = ChatFormat(build_tiny_tokenizer())
CHATS = {
    (calls, thoughts): ChatFormat(CHAT.tokenizer, tool_parser=calls, reasoning_parser=thoughts)
    for calls in ("none", "hermes", "llama_json")
    for thoughts in ("none", "think")
}
TOOL = {"type": "function", "function": {"name": "f"}}


@given(st.lists(st.integers(0, 483), max_size=40), st.sampled_from([(), ("ab",), ("hello",)]))
@settings(deadline=None, max_examples=60)
def test_the_pieces_of_a_stream_add_up_to_the_text(token_ids, stop):
    stream = TextStream(CHAT, stop)
    pieces = [stream.push(token_id) for token_id in token_ids]
    text = CHAT.decode(token_ids)
    assert "".join(pieces) + stream.finish(text) == text


BYTES = [token_id for token_id in range(484) if CHAT.decode([token_id]) == "\ufffd"]


@given(st.lists(st.sampled_from([*BYTES, *CHAT.encode("🤗é€a")]), min_size=30, max_size=90))
@settings(deadline=None, max_examples=30)
def test_the_pieces_of_broken_characters_add_up_to_the_text(token_ids):
    stream = TextStream(CHAT, ())
    sent = "".join([stream.push(token_id) for token_id in token_ids])
    text = CHAT.decode(token_ids)
    assert sent + stream.finish(text) == text


def test_a_model_that_writes_no_whole_character_does_not_have_all_of_it_decoded_again_each_time():
    decoded = 0

    class Counting:
        def decode(self, token_ids):
            nonlocal decoded
            decoded += len(token_ids)
            return CHAT.decode(token_ids)

    stream = TextStream(Counting(), ())
    sent = "".join([stream.push(BYTES[0]) for _ in range(2000)])
    assert len(sent) > 1900
    assert decoded < 100 * 2000


def test_a_character_split_over_tokens_is_sent_whole():
    stream = TextStream(CHAT, ())
    pieces = [stream.push(token_id) for token_id in CHAT.encode("a🤗b")]
    assert pieces[0] == "a"
    assert "".join(pieces) == "a🤗b"
    assert "\ufffd" not in "".join(pieces)


def test_what_may_begin_a_stop_text_is_held_back():
    stream = TextStream(CHAT, ("END",))
    sent = "".join(stream.push(token_id) for token_id in CHAT.encode("xxEND"))
    assert "xx".startswith(sent)
    assert sent + stream.finish("xx") == "xx"


PIECES = ["a", " ", "\n", "<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "<think"]
PIECES += ['{"name": "f", "arguments": {}}', "<|python_tag|>", "{", "END", "é🤗"]


@given(
    st.lists(st.sampled_from(PIECES), max_size=9).map("".join),
    st.sampled_from(["none", "hermes", "llama_json"]),
    st.sampled_from(["none", "think"]),
    st.booleans(),
    st.sampled_from([(), ("END",)]),
)
@settings(deadline=None, max_examples=75)
def test_the_pieces_of_an_answer_add_up_to_what_the_whole_is_parsed_into(
    text, tool_parser, reasoning_parser, is_open, stop
):
    chat = CHATS[tool_parser, reasoning_parser]
    is_open = is_open and reasoning_parser == "think"
    stream = AnswerStream(TextStream(chat, stop), tool_parser, reasoning_parser, is_open=is_open)
    pieces = [stream.push(token_id) for token_id in chat.encode(text)]
    whole = chat.decode(chat.encode(text)).partition("END")[0] if stop else text
    parsed = chat.parse(whole, [TOOL], is_reasoning=is_open)

    rest = stream.finish(parsed)

    assert "".join([p.reasoning for p in pieces] + [rest.reasoning]) == (parsed.reasoning or "")
    assert "".join([p.content for p in pieces] + [rest.content]) == parsed.content


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm so\n</think>\n\nyes it is", "hm so", "yes it is"),
        ('look <tool_call>{"name": "f", "arguments": {}}</tool_call>', "", "look"),
        ("it < that", "", "it < that"),
    ],
)
def test_text_and_reasoning_are_sent_before_the_answer_is_whole(text, reasoning, content):
    chat = CHATS["hermes", "think"]
    stream = AnswerStream(TextStream(chat, ()), "hermes", "think")
    pieces = [stream.push(token_id) for token_id in chat.encode(text)]
    assert "".join(p.reasoning for p in pieces) == reasoning
    assert "".join(p.content for p in pieces) == content


def test_each_choice_has_a_seed_of_its_own_and_the_first_has_the_requests():
    seeded = SamplingParams(seed=7)
    seeds = [choice_sampling(seeded, index).seed for index in range(4)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert choice_sampling(SamplingParams(seed=8), 0).seed not in seeds[1:]
    assert choice_sampling(SamplingParams(), 3).seed is None


@pytest.mark.parametrize("index", [1, 2])
def test_choices_are_repeatable(index):
    seeded = SamplingParams(seed=7)
    assert choice_sampling(seeded, index) == choice_sampling(seeded, index)
