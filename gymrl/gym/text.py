"""Token ids to text, through the light `tokenizers` package; transformers is not needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from gymrl.gym.episode import DecodeFunction


def load_tokenizer(tokenizer: str, *, setting: str = "gym.tokenizer") -> Tokenizer:
    """A tokenizer of the light package.

    Args:
        tokenizer: A directory with ``tokenizer.json``, that file itself, or a hub id, which is
            fetched through the hub's client and its cache.
        setting: Where it was named, as an error says it.

    Raises:
        ConfigError: There is no tokenizer, or it does not load.
    """
    # Rows are decoded in threads of ours; a pool of its own would only fight them for cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = Path(tokenizer)
    try:
        if path.is_dir():
            return Tokenizer.from_file(str(path / "tokenizer.json"))
        elif path.is_file():
            return Tokenizer.from_file(str(path))
        else:
            return Tokenizer.from_pretrained(tokenizer)
    except Exception as error:
        raise ConfigError(
            f"tokenizer {tokenizer!r} cannot be loaded: {error}; name a directory that holds "
            "tokenizer.json",
            setting=setting,
        ) from error


def load_decoder(tokenizer: str) -> DecodeFunction:
    """A function that decodes batches of token ids; special tokens are kept as they are.

    Args:
        tokenizer: A directory with ``tokenizer.json``, that file itself, or a hub id, which is
            fetched through the hub's client and its cache.

    Raises:
        ConfigError: There is no tokenizer, or it does not load.
    """
    loaded = load_tokenizer(tokenizer)
    if isinstance(loaded.decoder, ByteLevel):
        return _decode_bytes(_TokenBytes(loaded))

    def decode(spans: list[list[int]]) -> list[str]:
        texts: list[str] = loaded.decode_batch(spans, skip_special_tokens=False)
        return texts

    return decode


def _decode_bytes(token_bytes: _TokenBytes) -> DecodeFunction:
    """Byte-level decoding from a table: the same texts as the tokenizer's, in a quarter the time."""

    def decode(spans: list[list[int]]) -> list[str]:
        look_up = token_bytes.__getitem__
        return [b"".join(map(look_up, ids)).decode("utf-8", "replace") for ids in spans]

    return decode


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, filled in as tokens are met.

    A token is spelled in the characters that stand for bytes; one that is not (an added token, say)
    is its own text. An id that the vocabulary lacks is nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            spelled = b""
        elif all(character in _BYTE_OF for character in token):
            spelled = bytes(_BYTE_OF[character] for character in token)
        else:
            spelled = token.encode()
        self[token_id] = spelled
        return spelled


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones are themselves, the rest follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF = _byte_characters()
