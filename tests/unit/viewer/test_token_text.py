"""The text of each token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import ConfigError
from gymrl.viewer.token_text import TokenTexts
from tests.unit.deepseek_files import PATH, tokenizer

REAL = tokenizer()
TEXTS = TokenTexts(PATH)


def ids_of(text):
    return np.array(REAL.encode(text, add_special_tokens=False).ids, np.int32)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=60))
def test_the_texts_of_the_tokens_put_together_are_the_text(text):
    ids = ids_of(text)
    assert "".join(TEXTS.of(ids, 0, len(ids))) == REAL.decode(ids, skip_special_tokens=False)


def test_a_token_that_ends_inside_a_character_leaves_it_to_the_next():
    ids = ids_of("\N{GRINNING FACE}")
    texts = TEXTS.of(ids, 0, len(ids))
    assert len(texts) > 1
    assert texts == [""] * (len(texts) - 1) + ["\N{GRINNING FACE}"]


def test_a_span_that_begins_inside_a_character_ends_it():
    ids = ids_of("so \N{GRINNING FACE} it is")
    whole = TEXTS.of(ids, 0, len(ids))
    assert [TEXTS.of(ids, start, len(ids)) for start in range(len(ids))] == [
        whole[start:] for start in range(len(ids))
    ]


def test_ids_that_the_vocabulary_lacks_have_no_text():
    assert TEXTS.of(np.array([-1, 2**31 - 1], np.int32), 0, 2) == ["", ""]


def test_what_is_no_tokenizer_names_the_option(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        TokenTexts(str(tmp_path))
    assert caught.value.setting == "--tokenizer"
