import json

import pytest

from gymrl.scoring.answer import Answer
from gymrl.scoring.masks import LENGTH_REASONS, hit_max_tokens, is_flagged, is_length_reason, masked
from tests.unit.scoring.samples import trajectory


def view(**fields):
    return Answer(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mask_sample": True}, True),
        ({"mask_sample": False}, False),
        ({"mask_sample": None}, False),
        ({"mask_sample": "true"}, False),
        ({}, False),
        ({"mask_sample": False, "instance_config": {"mask_sample": True}}, True),
        ({"mask_sample": True, "instance_config": {"mask_sample": False}}, True),
        ({"mask_sample": None, "instance_config": {"mask_sample": True}}, True),
        ({"instance_config": {"mask_sample": None}}, False),
        ({"instance_config": None}, False),
        ({"instance_config": "mask_sample"}, False),
        ({"instance_config": [True]}, False),
    ],
)
def test_either_flag_masks_and_null_is_no(fields, expected):
    assert is_flagged(view(**fields)) is expected


def test_flags_can_be_set_aside():
    flagged = view(mask_sample=True)
    assert masked(trajectory(), flagged)
    assert masked(trajectory(mask_sample=True), view())
    assert not masked(trajectory(), flagged, honor_flags=False)
    assert not masked(trajectory(mask_sample=True), view(), honor_flags=False)


def test_a_masked_placeholder_stays_masked():
    assert masked(trajectory(mask_sample=True, placeholder=True), view(), honor_flags=False)


@pytest.mark.parametrize(
    "reason",
    ["max_output_tokens", "length", "max_tokens", "max_model_len", "context_length_exceeded"],
)
def test_a_length_reason_is_truncation_below_the_limit(reason):
    assert reason in LENGTH_REASONS
    assert hit_max_tokens(trajectory(incomplete_reason=reason), 1000)
    assert hit_max_tokens(trajectory(incomplete_reason=reason), None)
    answer = view(response={"incomplete_details": {"reason": reason}})
    assert hit_max_tokens(trajectory(), 1000, answer)


@pytest.mark.parametrize("reason", ["content_filter", "", None, 5, [], {"reason": "length"}])
def test_another_reason_is_no_truncation(reason):
    assert not is_length_reason(reason)
    for details in (None, [], "length", {"reason": reason}, {}):
        answer = view(response={"incomplete_details": details})
        assert not hit_max_tokens(trajectory(), 1000, answer)
    assert not hit_max_tokens(trajectory(), 1000, view(response=None))


@pytest.mark.parametrize(("limit", "expected"), [(3, True), (4, True), (5, False), (None, False)])
def test_reaching_the_limit_is_truncation(limit, expected):
    assert hit_max_tokens(trajectory(pairs=(((1, 2), (3, 4)),)), limit) is expected
