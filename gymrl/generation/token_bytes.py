"""The bytes that a token stands for, also where they are no whole character.

A tokenizer's own decoding writes U+FFFD for such a token. Its piece tells the bytes: byte-level BPE has a
printable character for each (GPT-2's `bytes_to_unicode`), SentencePiece falls back to ``<0xE2>``.
"""

from __future__ import annotations

import re
from functools import cache

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


@cache
def _byte_of_character() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


def token_bytes(text: str, piece: str) -> bytes:
    """The bytes of one token.

    Args:
        text: As the tokenizer decodes it, alone.
        piece: As its vocabulary has it.
    """
    if _REPLACEMENT not in text:
        return text.encode()
    fallback = _FALLBACK.fullmatch(piece)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    table = _byte_of_character()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return text.encode()
