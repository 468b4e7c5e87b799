"""The text of each token, so that the texts of a sequence's tokens put together are its text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from gymrl.gym.text import load_tokenizer

if TYPE_CHECKING:
    from gymrl.types import Int32Array

_RUN_UP = 16
"""Tokens before a span that are decoded with it: a character may begin there."""


class TokenTexts:
    """Token ids to texts, one by one.

    Args:
        tokenizer: A directory with ``tokenizer.json``, that file, or a hub id.

    Raises:
        ConfigError: It can't be loaded.
    """

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = load_tokenizer(tokenizer, setting="--tokenizer")
        self._size = self._tokenizer.get_vocab_size()

    def of(self, ids: Int32Array, start: int, end: int) -> list[str]:
        """The texts of tokens ``[start, end)``.

        A token that ends inside a character has an empty text, and the one that completes it has
        all of the character. Ids that the vocabulary lacks have an empty text.
        """
        first = max(0, start - _RUN_UP)
        stream = DecodeStream(skip_special_tokens=False)
        texts = [
            (stream.step(self._tokenizer, token) or "") if 0 <= token < self._size else ""
            for token in ids[first:end].tolist()
        ]
        return texts[start - first :]
