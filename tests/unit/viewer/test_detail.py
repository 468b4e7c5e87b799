"""One row, told without its arrays, and its tokens in spans."""

import base64
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import RowValueError
from gymrl.records import MediaFolder
from gymrl.types import ImageRef, Reward, SideTrajectory, Turn, WeightVersionSpan
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
        path = tmp_path / "rollouts.jsonl"
        path.unlink(missing_ok=True)
        write_rollouts(path, [outcome], **options)
        return DecodedRow(2, path.read_bytes().splitlines(keepends=True)[1], MediaFolder(path))

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


def test_an_image_beside_the_file_is_shown_at_its_turn_and_in_the_conversation(row, tmp_path):
    digest = hashlib.sha256(PNG).hexdigest()
    shown = ImageRef(digest=digest, media_type="image/png", width=8, height=6)
    decoded = row(
        trajectory(images=((shown, shown),), media={digest: PNG}),
        prompts=with_image(f"gymrl-image:{digest}:data:image/png;base64,"),
    )
    view = decoded.view()

    assert view.images == 1
    assert [image.number for image in view.sequences[0].turns[0].images] == [0, 0]
    assert [part.image for part in view.conversation[0].parts] == [0]
    assert decoded.image(0) == ("image/png", PNG)
    (tmp_path / "rollouts.jsonl.media" / digest).unlink()
    with pytest.raises(RowValueError, match="is not beside the file"):
        row(trajectory(images=((shown,),))).image(0)


def test_a_digest_does_not_lead_out_of_the_folder(row, tmp_path):
    (tmp_path / "secret.png").write_bytes(PNG)
    outside = ImageRef(digest="../secret.png", media_type="image/png", width=8, height=6)
    with pytest.raises(RowValueError):
        row(trajectory(images=((outside,),))).image(0)


def test_the_experts_of_a_token_are_those_of_its_layers(row):
    routes = np.arange(5 * 2 * 3, dtype=np.int8).reshape(5, 2, 3)
    decoded = row(trajectory(routed_experts=routes))

    assert decoded.view().sequences[0].experts == (2, 3)
    assert decoded.experts(4) == [[24, 25, 26], [27, 28, 29]]
    with pytest.raises(RowValueError, match="no routes of token 5"):
        decoded.experts(5)
    with pytest.raises(RowValueError, match="no routes of token 0"):
        row(trajectory()).experts(0)


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
    ("found", "instead", "said"),
    [
        (b"[0,1,2,3,4]", b"[0,1,2,3]", "4 token ids and 5"),
        (b"[0,1,", b"[99999999999,1,", "token_ids"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path, found, instead, said):
    path = write_rollouts(tmp_path / "rollouts.jsonl", [trajectory()])
    line = path.read_bytes().splitlines(keepends=True)[1]
    with pytest.raises(RowValueError, match=said):
        DecodedRow(2, line.replace(found, instead))


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
