"""A line's JSON, level by level."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import RowValueError
from gymrl.viewer.raw import ENTRIES, STRING_CHARS, RawEntry, raw_node

LINE = json.dumps(
    {
        "a": {"b": [1, 2.5, None, True]},
        "long": list(range(250)),
        "text": "x" * (STRING_CHARS + 7),
        "large": 12345678901234567890,
        "": {"0": "zero"},
    }
).encode()


def node(*path, offset=0):
    return raw_node(LINE, json.dumps(path), offset)


def test_a_level_has_its_members_without_theirs():
    assert node().entries[:2] == [
        RawEntry("a", "object", 1, ""),
        RawEntry("long", "array", 250, ""),
    ]
    assert node("a", "b").entries == [
        RawEntry(0, "number", 0, "1"),
        RawEntry(1, "number", 0, "2.5"),
        RawEntry(2, "null", 0, "null"),
        RawEntry(3, "boolean", 0, "true"),
    ]


def test_a_long_list_comes_in_parts():
    last = node("long", offset=200)
    assert (last.length, last.offset, len(last.entries)) == (250, 200, 50)
    assert last.entries[0] == RawEntry(200, "number", 0, "200")
    assert len(node("long").entries) == ENTRIES


def test_a_long_text_comes_in_parts():
    assert len(node("text").text) == STRING_CHARS
    assert node("text", offset=STRING_CHARS).text == "x" * 7


def test_a_number_keeps_all_its_digits():
    assert node("large").text == "12345678901234567890"


def test_names_and_positions_are_not_mixed_up():
    assert node("", "0").text == "zero"
    for path in (("a", 0), ("long", "0"), ("long", -1), ("long", 250), ("nowhere",), ("large", 0)):
        with pytest.raises(RowValueError, match="nothing at"):
            node(*path)


@pytest.mark.parametrize("path", ["", "{}", '["a"', "[null]", "[[1]]"])
def test_a_path_is_a_json_array(path):
    with pytest.raises(RowValueError, match="no JSON array"):
        raw_node(LINE, path, 0)


@settings(deadline=None, max_examples=50)
@given(st.integers(-10, 400))
def test_an_offset_of_any_size_is_cut_to_what_there_is(offset):
    found = node("long", offset=offset)
    assert [entry.key for entry in found.entries] == list(range(250))[max(0, offset) :][:ENTRIES]
