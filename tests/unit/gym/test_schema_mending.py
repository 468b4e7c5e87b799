"""Answers that are no JSON, mended or told of, in time that grows with their length."""

from gymrl.gym.schema import deepest_path, mend


def test_a_body_that_ends_inside_a_text_of_quotes_is_gone_over_once():
    body = b'{"a": NaN, "arguments": "' + b'\\"' * 500_000
    mended, counts = mend(body)
    assert counts == {"replaced_nonfinite": 1}
    assert mended == body.replace(b"NaN", b"null")
    assert deepest_path(body) == "$.arguments"


def test_names_of_numbers_stay_in_texts():
    body = rb'{"a": "NaN \" Infinity", "b": [-Infinity, NaN]}'
    assert mend(body) == (
        rb'{"a": "NaN \" Infinity", "b": [null, null]}',
        {"replaced_nonfinite": 2},
    )
