"""Ids to text: the same as the tokenizer's own decoding, whatever the ids."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import ConfigError
from gymrl.gym.text import load_decoder
from tests.unit.deepseek_files import PATH, tokenizer

REAL = tokenizer()
DECODE = load_decoder(PATH)


def own(tokenizer, spans):
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in spans]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, REAL.get_vocab_size() + 50), max_size=30), max_size=3))
def test_any_ids_decode_as_the_tokenizer_decodes_them(spans):
    assert DECODE(spans) == own(REAL, spans)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=40))
def test_a_text_comes_back_as_it_was(text):
    ids = REAL.encode(text, add_special_tokens=False).ids
    assert DECODE([ids]) == own(REAL, [ids])


def test_parts_of_a_character_are_replaced_and_special_tokens_kept():
    ids = REAL.encode("\N{GRINNING FACE}", add_special_tokens=False).ids
    special = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    end = REAL.token_to_id(special)
    assert len(ids) > 1
    assert DECODE([ids[:1], [end], ids]) == ["\ufffd", special, "\N{GRINNING FACE}"]


def test_a_tokenizer_of_another_kind_decodes_itself(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"}
    path = tmp_path / "tokenizer.json"
    parts = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    whole = {"version": "1.0", **parts, "added_tokens": [], "model": model}
    path.write_text(json.dumps(whole))
    assert load_decoder(str(tmp_path))([[0, 1, 7], []]) == ["a b", ""]


def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_decoder(str(tmp_path))
