"""Routes of calls along the tokens of a trajectory, against a naive walk token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.routed_experts import (
    RouteFormatError,
    RouteSequence,
    routes_or_missing,
    unknown_routes,
)


def call(first: int, rows: int, dtype: str = "int16") -> np.ndarray:
    """Routes whose every id tells the call (hundreds) and the row."""
    return (first + np.arange(rows)).reshape(rows, 1, 1).astype(dtype)


def test_a_turn_takes_its_own_tokens_and_mends_the_last_one_before():
    sequence = RouteSequence()
    sequence.add(call(100, 5), 3, 2)
    sequence.add(call(200, 9), 1, 3)

    #             prompt         sampled        prompt  sampled
    expected = [100, 101, 102, 103, 204, 205, 206, 207, 208]
    assert sequence.array().ravel().tolist() == expected


def test_what_was_given_is_not_changed_by_the_mending():
    first = call(100, 5)
    sequence = RouteSequence()
    sequence.add(first, 3, 2)
    sequence.add(call(200, 9), 1, 3)

    sequence.array()

    assert first.ravel().tolist() == [100, 101, 102, 103, 104]


def test_a_turn_that_came_without_routes_is_all_missing_though_a_later_prompt_covers_it():
    sequence = RouteSequence()
    sequence.add(None, 2, 2)
    sequence.add(call(200, 6), 1, 1)

    assert sequence.array().ravel().tolist() == [-1, -1, -1, -1, 204, 205]
    assert sequence.missing_turns == [0]


def test_rows_beyond_the_tokens_are_left_out():
    sequence = RouteSequence()
    sequence.add(call(100, 8), 3, 2)

    assert sequence.array().ravel().tolist() == [100, 101, 102, 103, 104]


def test_the_last_rows_alone_do_as_well():
    sequence = RouteSequence()
    sequence.add(call(100, 5), 3, 2)
    assert sequence.first_wanted == 4
    sequence.add(call(204, 5), 1, 3, num_rows=9)

    assert sequence.array().ravel().tolist() == [100, 101, 102, 103, 204, 205, 206, 207, 208]


def test_one_row_too_few_names_both_numbers_and_changes_nothing():
    sequence = RouteSequence()
    sequence.add(call(100, 5), 3, 2)

    with pytest.raises(RouteFormatError) as caught:
        sequence.add(call(200, 8), 1, 3)

    assert "8 rows of routes for 9 tokens (prompt 6 + generation 3)" in str(caught.value)
    assert sequence.array().ravel().tolist() == [100, 101, 102, 103, 104]


def test_other_layers_than_before_are_refused():
    sequence = RouteSequence()
    sequence.add(np.zeros((2, 3, 4), dtype=np.int8), 1, 1)

    with pytest.raises(RouteFormatError, match=r"shape \[3, 2\].*follow routes of shape \[3, 4\]"):
        sequence.add(np.zeros((4, 3, 2), dtype=np.int8), 1, 1)


def test_turns_of_different_types_meet_in_the_wider_one():
    sequence = RouteSequence()
    sequence.add(call(100, 2, "int8"), 1, 1)
    sequence.add(call(300, 4, "int16"), 1, 1)

    assert sequence.array().dtype == np.int16
    assert sequence.array().ravel().tolist() == [100, 301, 302, 303]


def test_a_type_that_is_asked_for_holds_every_id_or_the_routes_are_refused():
    sequence = RouteSequence()
    sequence.add(call(100, 2), 1, 1)
    sequence.add(call(300, 4), 1, 1)

    assert sequence.array("int32").dtype == np.int32
    with pytest.raises(RouteFormatError, match="expert id 303 does not fit int8"):
        sequence.array("int8")


def test_no_routes_at_all_are_none():
    sequence = RouteSequence()
    assert sequence.array() is None
    sequence.add(None, 3, 2)
    assert sequence.array() is None


@st.composite
def turns_of_calls(draw):
    turns = []
    for _ in range(draw(st.integers(1, 5))):
        added, sampled = draw(st.integers(0, 4)), draw(st.integers(1, 4))
        has_routes, extra = draw(st.booleans()), draw(st.integers(0, 2))
        turns.append((added, sampled, has_routes, extra))
    return turns


@settings(deadline=None, max_examples=60)
@given(turns_of_calls())
def test_the_alignment_is_that_of_a_naive_walk(turns):
    sequence, naive, length, before_has_routes = RouteSequence(), [], 0, False
    for number, (added, sampled, has_routes, extra) in enumerate(turns):
        end = length + added + sampled
        routes = call(1000 * (number + 1), end + extra) if has_routes else None
        sequence.add(routes, added, sampled)
        if has_routes and before_has_routes:
            naive[-1] = 1000 * (number + 1) + length - 1
        first = 1000 * (number + 1)
        naive += [first + place if has_routes else -1 for place in range(length, end)]
        length, before_has_routes = end, has_routes

    array = sequence.array()

    if any(has_routes for _, _, has_routes, _ in turns):
        assert array.shape == (length, 1, 1)
        assert array.ravel().tolist() == naive
    else:
        assert array is None


def test_the_last_token_and_what_follows_the_last_sample_need_no_route():
    routes = np.array([0, -1, 1, -1, -1, 2, -1]).reshape(7, 1, 1)

    assert unknown_routes(routes, [(2, 4), (6, 7)]) == 3
    assert unknown_routes(routes, [(2, 4)]) == 1
    assert unknown_routes(routes, []) == 0


def test_samples_without_routes_get_sentinels_of_the_batchs_type():
    known = np.zeros((2, 3, 4), dtype=np.int16)

    first, second = routes_or_missing([None, known], [5, 2])

    assert first.shape == (5, 3, 4)
    assert first.dtype == np.int16
    assert (first == -1).all()
    assert second is known


def test_a_batch_without_any_routes_has_none():
    assert routes_or_missing([None, None], [1, 2]) is None


def test_samples_of_different_models_are_refused_by_place_and_shape():
    samples = [None, np.zeros((2, 3, 4), dtype=np.int8), np.zeros((2, 3, 8), dtype=np.int8)]

    with pytest.raises(RouteFormatError, match=r"sample 2 .*\[3, 8\].* sample 1 has \[3, 4\]"):
        routes_or_missing(samples, [2, 2, 2])
