"""Token ids to text, through the light `tokenizers` package; transformers is not needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from gymrl.gym.episode import DecodeFunction


def load_decoder(tokenizer: str) -> DecodeFunction:
    """A function that decodes batches of token ids; special tokens are kept as they are.

    Args:
        tokenizer: A directory with ``tokenizer.json``, that file itself, or a hub id, which is
            fetched through the hub's client and its cache.

    Raises:
        ConfigError: There is no tokenizer, or it does not load.
    """
    # Rows are decoded in threads of ours; a pool of its own would only fight them for cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = Path(tokenizer)
    try:
        if path.is_dir():
            loaded = Tokenizer.from_file(str(path / "tokenizer.json"))
        elif path.is_file():
            loaded = Tokenizer.from_file(str(path))
        else:
            loaded = Tokenizer.from_pretrained(tokenizer)
    except Exception as error:
        raise ConfigError(
            f"tokenizer {tokenizer!r} cannot be loaded: {error}; name a directory that holds "
            "tokenizer.json",
            setting="gym.tokenizer",
        ) from error

    def decode(spans: list[list[int]]) -> list[str]:
        texts: list[str] = loaded.decode_batch(spans, skip_special_tokens=False)
        return texts

    return decode
