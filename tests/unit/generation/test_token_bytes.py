import pytest

from gymrl.generation.chat import ChatFormat
from gymrl.generation.token_bytes import token_bytes


@pytest.mark.parametrize(
    ("text", "piece", "spelled"),
    [
        (" the", "\u0120the", b" the"),
        ("\ufffd", "\u00f0\u0141", b"\xf0\x9f"),
        ("a\ufffd", "a\u00e2", b"a\xe2"),
        ("\ufffd", "<0xE2>", b"\xe2"),
        ("\ufffd", "\ufffd", "\ufffd".encode()),
    ],
)
def test_a_token_stands_for_its_bytes(text, piece, spelled):
    assert token_bytes(text, piece) == spelled


def test_bytes_of_log_probabilities_join_to_the_text_that_was_sampled(tiny_tokenizer):
    """Each token of a character that takes several was three bytes of U+FFFD."""
    chat = ChatFormat(tiny_tokenizer)
    text = "h\u00e9llo \U0001f642 \u65e5\u672c"
    ids = chat.encode(text)
    entries = chat.logprob_entries(ids, [-0.5] * len(ids))
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
