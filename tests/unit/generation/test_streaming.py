import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import SamplingParams
from gymrl.generation.chat import ChatFormat
from gymrl.generation.chat_api import choice_sampling
from gymrl.generation.streaming import TextStream
from gymrl.testing import build_tiny_tokenizer

CHAT = ChatFormat(build_tiny_tokenizer())


@given(st.lists(st.integers(0, 483), max_size=40), st.sampled_from([(), ("ab",), ("hello",)]))
@settings(deadline=None, max_examples=100)
def test_the_pieces_of_a_stream_add_up_to_the_text(token_ids, stop):
    stream = TextStream(CHAT, stop)
    pieces = [stream.push(token_id) for token_id in token_ids]
    text = CHAT.decode(token_ids)
    assert "".join(pieces) + stream.finish(text) == text


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
