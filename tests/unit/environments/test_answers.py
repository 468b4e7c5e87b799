import pytest

from gymrl.environments.builtin.answers import extract_answer, last_code_block, last_tagged


@pytest.mark.parametrize(
    ("text", "extractor", "answer"),
    [
        ("  42 \n", "whole", "42"),
        ("", "whole", None),
        ("from 3 to -17.", "last_integer", "-17"),
        ("none", "last_integer", None),
        ("Yes, of course", "first_word", "Yes"),
        ("...", "first_word", None),
        ("<answer>1</answer> or <ANSWER> 2 </ANSWER>", "answer_tag", "2"),
        ("<answer>1", "answer_tag", None),
        ("<answer></answer>", "answer_tag", None),
    ],
)
def test_the_answer_is_what_the_extractor_names(text, extractor, answer):
    assert extract_answer(text, extractor) == answer


def test_a_tag_that_a_stop_text_left_open_is_read_where_that_is_expected():
    assert last_tagged("I go <action>up", "action", may_be_open=True) == "up"
    assert last_tagged("I go <action>up</action>", "action", may_be_open=True) == "up"
    assert last_tagged("<action>up</action> <action>left", "action", may_be_open=True) == "left"
    assert last_tagged("I go <action>up", "action") is None


def test_a_letter_that_is_longer_in_lower_case_shifts_nothing():
    assert last_tagged("İİİİ<a>x</a>", "a") == "x"


def test_ten_thousand_open_tags_take_no_time_to_speak_of():
    assert last_tagged("<answer>" * 10_000, "answer") is None
    assert last_code_block("```" * 9_999) is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```\nand\n```py\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\n```python\nunclosed", "print(1)\n"),
        ("```python\nunclosed", None),
        ("no code", None),
        ("```python\n\n```", None),
        ("```x = 1```", "x = 1\n"),
    ],
)
def test_the_last_closed_block_is_the_program(text, code):
    assert last_code_block(text) == code
