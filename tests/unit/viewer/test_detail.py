"""One row, told without its arrays, and its tokens in spans."""

import base64
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import RowValueError
from gymrl.records import MediaFolder
from gymrl.types import Reward, SideTrajectory, Turn, WeightVersionSpan
from gymrl.viewer.detail import (
    MAX_SPAN,
    DecodedRow,
    LedgerLine,
    decode_image,
    first_difference,
    ledger_lines,
)
from tests.rollout_files import failure, trajectory, write_rollouts

PNG = b"\x89PNG\r\n\x1a\n" + b"rest"


@pytest.fixture
def row(tmp_path):
    def make(outcome, **options):
        path = write_rollouts(tmp_path / "rollouts.jsonl", [outcome], **options)
        return DecodedRow(2, path.read_bytes().splitlines(keepends=True)[1])

    return make


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def with_image(source):
    content = [{"type": "input_image", "image_url": source}]
    return {0: [{"role": "user", "content": content}]}


def test_the_ledger_says_what_each_rule_changed():
    reward = Reward(1.0, {"right": 1.0}).adjusted("effort", 0.75).adjusted("length", 0.875)
    assert ledger_lines(reward) == [
        LedgerLine("verifier", 1.0, None),
        LedgerLine("effort", 0.75, -0.25),
        LedgerLine("length", 0.875, 0.125),
    ]


def test_a_view_has_the_facts_of_the_row(row):
    made = trajectory(
        Reward(1.0).adjusted("effort", 0.5),
        mask_sample=True,
        incomplete_reason="max_output_tokens",
        notes={"scorer_error": 1},
        weight_versions=(WeightVersionSpan("step-3", 3, 5),),
    )
    view = row(made).view()

    assert (view.line, view.agent, view.route, view.total) == (2, "math_agent", "math", 0.5)
    assert (view.mask_sample, view.incomplete_reason) == (True, "max_output_tokens")
    assert view.notes == {"scorer_error": 1}
    assert view.weight_versions == (WeightVersionSpan("step-3", 3, 5),)
    [sequence] = view.sequences
    assert (sequence.num_tokens, sequence.num_generated) == (5, 2)


def test_a_turn_says_how_sure_the_model_was(row):
    [turn] = row(trajectory(prompt=2, logprobs=(-1.0, -3.0, -2.0))).view().sequences[0].turns
    assert (turn.mean_logprob, turn.min_logprob, turn.min_at) == (-2.0, -3.0, 3)
    assert (turn.prompt.text, turn.generation.text) == ("What is 2 + 2?", "It is 4.")


def test_a_turn_without_sampled_tokens_has_no_such_numbers(row):
    made = trajectory(logprobs=(), turns=(Turn(start=0, generation_start=3, end=3),))
    [turn] = row(made).view().sequences[0].turns
    assert (turn.mean_logprob, turn.min_logprob, turn.min_at) == (None, None, None)


def test_a_failure_has_its_facts_and_no_tokens(row):
    decoded = row(failure(status=504, fields={"seconds": 30.0}))
    view = decoded.view()

    assert (view.failure.error, view.failure.status, view.failure.attempts) == (
        "RolloutTimeout",
        504,
        3,
    )
    assert view.failure.traceback.startswith("Traceback")
    assert (view.reward, view.total, view.ledger, view.sequences) == (None, None, [], [])
    with pytest.raises(RowValueError, match="no sequence 0"):
        decoded.tokens(0, 1)


def test_tokens_come_in_spans_that_are_cut_to_what_there_is(row):
    decoded = row(trajectory(prompt=3, logprobs=(-0.5, -2.0)))
    span = decoded.tokens(2, 100)

    assert (span.start, span.ids, span.texts) == (2, [2, 3, 4], None)
    assert span.logprobs == [0.0, -0.5, -2.0]
    assert decoded.tokens(50, 60).ids == []
    with pytest.raises(RowValueError, match="at most 4096"):
        decoded.tokens(0, MAX_SPAN + 1)


def test_side_trajectories_are_sequences_of_their_own(row):
    side = SideTrajectory(
        token_ids=np.array([7, 8], np.int32),
        logprobs=np.array([0.0, -1.0], np.float32),
        turns=(Turn(start=0, generation_start=1, end=2),),
    )
    decoded = row(trajectory(side_trajectories=(side,)))

    assert [one.num_tokens for one in decoded.view().sequences] == [5, 2]
    assert decoded.tokens(0, 2, 1).ids == [7, 8]


def test_an_image_comes_with_the_type_that_its_bytes_have(row):
    decoded = row(trajectory(), prompts=with_image(data_url(PNG, "image/svg+xml")))
    assert decoded.image(0) == ("image/png", PNG)
    with pytest.raises(RowValueError, match="no image 1"):
        decoded.image(1)


def test_an_image_beside_the_file_is_shown_wherever_the_line_refers_to_it(tmp_path):
    digest = hashlib.sha256(PNG).hexdigest()
    reference = f"gymrl-image:{digest}:data:image/png;base64,"
    path = write_rollouts(tmp_path / "r.jsonl", [trajectory()], prompts=with_image(reference))
    folder = MediaFolder(path)
    line = path.read_bytes().splitlines(keepends=True)[1]
    with pytest.raises(RowValueError, match="not beside the file"):
        DecodedRow(2, line, folder).image(0)
    folder.write({digest: PNG})
    assert DecodedRow(2, line, folder).image(0) == ("image/png", PNG)
    answer = {"type": "function_call_output", "output": reference}
    path = write_rollouts(tmp_path / "s.jsonl", [trajectory()], prompts={0: [answer]})
    line = path.read_bytes().splitlines(keepends=True)[1]
    assert DecodedRow(2, line, folder).image(0) == ("image/png", PNG)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0rest", "image/jpeg"),
        (b"GIF89arest", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPrest", "image/webp"),
    ],
)
def test_the_kinds_that_are_shown(data, kind):
    assert decode_image(data_url(data)) == (kind, data)


@pytest.mark.parametrize(
    "source",
    [data_url(b"<svg onload='alert(1)'/>", "image/svg+xml"), data_url(b"<html>"), "data:,*", "?"],
)
def test_nothing_else_is_served_as_an_image(source):
    with pytest.raises(RowValueError):
        decode_image(source)


def test_a_line_that_is_no_whole_record_is_named():
    with pytest.raises(RowValueError, match="line 9 is no record of a row"):
        DecodedRow(9, b'{"record":"row","group":0}')


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2], [1, 2, 3], 2),
        ([1, 9, 3], [1, 2, 3], 1),
        ([], [], None),
    ],
)
def test_the_first_difference(left, right, expected):
    assert first_difference(np.array(left, np.int32), np.array(right, np.int32)) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_sequences_agree_before_the_first_difference_and_not_at_it(left, right):
    found = first_difference(np.array(left, np.int32), np.array(right, np.int32))
    if found is None:
        assert left == right
    else:
        assert left[:found] == right[:found]
        assert left[found : found + 1] != right[found : found + 1]
