"""Turns that are tokenised once have the ids that the whole text gives them, or are not kept."""

import threading

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from gymrl.generation.chat import ChatFormat
from gymrl.generation.segments import TurnEncoder
from gymrl.testing import build_tiny_tokenizer
from tests.unit.generation.template_families import FAMILIES, deepseek_vocabulary, family

END = "<|im_end|>"
CORPUS = ["the word two one </s> and so on", "x y z 1 2 3 \u00e9 word word"]


def encoder_of(chat, **settings_):
    return TurnEncoder(chat.tokenizer.backend_tokenizer, chat.end_ids, **settings_)


def whole(chat, text):
    return chat.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def pieces(markers):
    return st.lists(
        st.one_of(
            st.sampled_from(markers),
            st.sampled_from(["<|im_", "end|>", "<", "|>", " ", "\n", "\n\n", "\u0301", "</think>"]),
            st.text(max_size=12),
        ),
        max_size=14,
    ).map("".join)


@pytest.mark.parametrize("name", [*FAMILIES, "deepseek's own vocabulary"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_ids_are_those_of_the_whole_text_whatever_stands_in_it(name, data):
    chat = family(name) if name in FAMILIES else deepseek_vocabulary()
    added = chat.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    encoder = encoder_of(chat)
    assert encoder.keeps_turns
    for text in data.draw(st.lists(pieces([token.content for token in added]), max_size=3)):
        sound = text.encode("utf-8", "replace").decode()
        for _ in range(2):  # tokenised, and remembered
            assert encoder.encode(sound) == whole(chat, sound)


def test_a_turn_is_tokenised_once_for_all_conversations_that_hold_it():
    chat = family("qwen3")
    turns = [f"<|im_start|>user\nquestion {n}{END}" for n in range(4)]
    encoder = encoder_of(chat)
    opening = "<|im_start|>assistant\n"
    encoder.encode(turns[0] + turns[1] + opening)
    held = encoder.nbytes
    encoder.encode(turns[1] + turns[0] + turns[1] + opening)
    assert encoder.nbytes == held
    encoder.encode("".join(turns[:3]))
    assert encoder.nbytes > held


def test_what_is_kept_is_bounded():
    chat = family("qwen3")
    encoder = encoder_of(chat, max_bytes=4096)
    for n in range(200):
        text = f"turn {n} of many{END}" * 3
        assert encoder.encode(text) == whole(chat, text)
        assert 0 < encoder.nbytes <= 4096
    nothing = encoder_of(chat, max_bytes=0)
    assert nothing.encode(f"a{END}b{END}") == whole(chat, f"a{END}b{END}")
    assert nothing.nbytes == 0


def test_threads_may_share_it():
    chat = family("llama31")
    encoder = encoder_of(chat, max_bytes=20_000)
    texts = [f"turn {n}<|eot_id|>" * (n % 7 + 1) for n in range(60)]
    expected = [whole(chat, text) for text in texts]
    wrong = []

    def work(offset):
        for n in range(120):
            place = (n + offset) % len(texts)
            if encoder.encode(texts[place]) != expected[place]:
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 7, 31)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert encoder.nbytes <= 20_000


def odd(pre_tokenizer=None, normalizer=None, end=None, others=()):
    """A tokenizer that breaks the rule in one way."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["?"],
        initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), "\u2581"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([end or AddedToken(END, special=True, normalized=False)])
    tokenizer.add_tokens(list(others))
    return tokenizer, tokenizer.token_to_id(END)


BREAKERS = {
    "a mark at the beginning of a text": {
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")
    },
    "a token that takes spaces after it": {
        "end": AddedToken(END, special=True, normalized=False, rstrip=True)
    },
    "a token that takes spaces before it": {
        "end": AddedToken(END, special=True, normalized=False, lstrip=True)
    },
    "a token that stands alone only": {
        "end": AddedToken(END, special=True, normalized=False, single_word=True)
    },
    "a token that the normalizer may make": {
        "normalizer": normalizers.Lowercase(),
        "end": AddedToken(END, special=True, normalized=True),
    },
    "a longer token around it": {"others": [AddedToken(f"{END}\n", normalized=False)]},
    "a token that ends where it begins": {"others": [AddedToken("x<|", normalized=False)]},
}


@pytest.mark.parametrize("how", BREAKERS)
def test_a_tokenizer_that_breaks_the_rule_is_given_whole_texts(how):
    tokenizer, end_id = odd(**BREAKERS[how])
    encoder = TurnEncoder(tokenizer, [end_id])
    assert not encoder.keeps_turns
    text = f"one word{END} two{END}\nx<|im_end|>word"
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_plain_tokenizer_of_that_make_keeps_the_rule():
    tokenizer, end_id = odd()
    assert TurnEncoder(tokenizer, [end_id]).keeps_turns


def test_a_metaspace_at_every_piece_keeps_the_rule():
    tokenizer, end_id = odd(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always"))
    encoder = TurnEncoder(tokenizer, [end_id])
    text = f"one word{END} two{END}three"
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_an_end_that_is_an_ordinary_token_is_no_border():
    tokenizer, _ = odd()
    encoder = TurnEncoder(tokenizer, [tokenizer.token_to_id("word")])
    assert not encoder.keeps_turns


class Counted:
    """A backend that counts what it is given."""

    def __init__(self, backend):
        self._backend = backend
        self.normalizer = backend.normalizer
        self.get_added_tokens_decoder = backend.get_added_tokens_decoder
        self.characters = 0

    def encode(self, text, add_special_tokens):
        self.characters += len(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens)


def test_a_conversation_is_tokenised_once_however_often_it_is_rendered():
    tokenizer = build_tiny_tokenizer()
    backend = Counted(tokenizer.backend_tokenizer)
    encoder = TurnEncoder(backend, [tokenizer.eos_token_id])
    backend.characters = 0
    messages, text = [], ""
    for n in range(40):
        messages.append({"role": "user", "content": f"question {n} " * 20})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert encoder.encode(text) == whole(ChatFormat(tokenizer), text)
        messages.append({"role": "assistant", "content": f"answer {n} " * 20})
    opening = len("\n<|im_start|>assistant\n")
    assert backend.characters <= len(text) + 40 * opening


def test_a_tokenizer_of_plain_python_is_given_whole_texts():
    fast = build_tiny_tokenizer()

    class Slow(transformers.PreTrainedTokenizerFast):
        @property
        def backend_tokenizer(self):
            return None

    slow = Slow(
        tokenizer_object=fast.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    slow.chat_template = fast.chat_template
    messages = [{"role": "user", "content": "hi"}]
    assert ChatFormat(slow).render(messages) == ChatFormat(fast).render(messages)
