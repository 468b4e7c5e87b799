import json

import numpy as np
import pytest

from gymrl.config import MediaConfig
from gymrl.errors import LedgerMismatchError, NoGenerationError
from gymrl.gym.episode import EpisodeOptions, read_episode
from gymrl.gym.images import ImageBins, held_source
from gymrl.testing.gym_server import gym_answer
from gymrl.token_ledger import (
    VERSION,
    LedgerCall,
    LedgerFrame,
    LedgerImage,
    joined_ids,
    joined_logprobs,
)
from gymrl.types import WeightVersionSpan


def frame(*calls, in_flight=0) -> LedgerFrame:
    """Each call: parent, common, whole prompt, sample, and fields of LedgerCall."""
    made, ids, logprobs = [], [], []
    for number, (parent, common, prompt, sample, fields) in enumerate(calls):
        made.append(
            LedgerCall(
                number=number,
                parent=parent,
                common=common,
                num_prompt=len(prompt),
                num_sampled=len(sample),
                finish_reason="stop",
                **fields,
            )
        )
        ids.append(np.array([*prompt, *sample][common:], dtype=np.int32))
        logprobs.append(np.full(len(sample), -0.5, dtype=np.float32))
    return LedgerFrame(
        VERSION, "r", "s", in_flight, tuple(made), joined_ids(ids), joined_logprobs(logprobs)
    )


TWO_TURNS = frame((-1, 0, [1, 2], [3], {}), (0, 3, [1, 2, 3, 4], [5, 6], {}))
WITH_SIDE = frame(
    (-1, 0, [1, 2], [3], {}),
    (0, 1, [1, 9], [8], {}),
    (0, 3, [1, 2, 3, 4], [5, 6], {}),
    in_flight=1,
)
ANSWER = gym_answer([([1, 2], [3]), ([1, 2, 3, 4], [5, 6])])


def read(answer, ledger, **options):
    body = json.dumps(answer).encode()
    return read_episode(body, agent="a", row=7, options=EpisodeOptions(**options), ledger=ledger)


def test_tokens_come_from_the_ledger_and_the_rest_from_the_answer():
    answer = {"reward": 0.25, "grade": "fair"}
    trajectory = read(answer, TWO_TURNS, token_source="ledger")
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert trajectory.logprobs.tolist() == [0, 0, -0.5, 0, -0.5, -0.5]
    assert [(t.start, t.generation_start, t.end) for t in trajectory.turns] == [
        (0, 2, 3),
        (3, 4, 6),
    ]
    assert trajectory.reward.verifier == 0.25
    assert json.loads(trajectory.result) == answer
    assert trajectory.notes == {}


def test_both_roads_give_the_same_trajectory():
    messages = read(ANSWER, None)
    both = read(ANSWER, TWO_TURNS, token_source="both")
    ledger = read(ANSWER, TWO_TURNS, token_source="ledger")
    for other in (both, ledger):
        assert other.token_ids.tolist() == messages.token_ids.tolist()
        assert other.logprobs.tolist() == messages.logprobs.tolist()
        assert other.turns == messages.turns
        assert other.result == messages.result


CAT, DOG, OWL = "a" * 64, "b" * 64, "c" * 64


def read_images(ledger, answer=ANSWER, **options) -> ImageBins:
    bins = ImageBins(MediaConfig())
    body = json.dumps(answer).encode()
    read_episode(body, agent="a", options=EpisodeOptions(**options), ledger=ledger, images=bins)
    return bins


def sources(*turns) -> list[tuple[str, ...]]:
    return [tuple(held_source(digest) for digest in turn) for turn in turns]


def test_images_that_the_server_showed_are_binned_by_their_place_among_the_tokens():
    """A black box's answer has none of them."""
    shown = frame(
        (-1, 0, [1, 9, 9, 2], [3], {"images": (LedgerImage(1, CAT),)}),
        (0, 5, [1, 9, 9, 2, 3, 4], [5], {}),
        (0, 1, [1, 9, 9], [8], {"images": (LedgerImage(1, DOG),)}),
        (1, 7, [1, 9, 9, 2, 3, 4, 5, 9, 9, 9, 9, 6], [7], {
            "images": (LedgerImage(7, DOG), LedgerImage(9, OWL)),
        }),
    )  # fmt: skip
    bins = read_images(shown, {"reward": 1.0}, token_source="ledger", side_calls="keep")
    assert bins.turns == bins.served == sources([CAT], [], [DOG, OWL])
    assert bins.sides == [sources([DOG])]


def test_a_prompt_without_an_answer_keeps_the_images_that_the_server_showed():
    unanswered = frame((-1, 0, [1, 9, 9], [], {"images": (LedgerImage(1, CAT),)}))
    answer = {"reward": 0.0, "response": {"output": [], "incomplete_details": {
        "reason": "max_output_tokens"}}}  # fmt: skip
    assert read_images(unanswered, answer, token_source="ledger").turns == sources([CAT])
    assert read_images(None, answer, token_source="ledger").turns == [()]


def test_with_both_roads_the_images_are_the_answers_and_the_servers_are_noted():
    shown = frame(
        (-1, 0, [1, 2], [3], {"images": (LedgerImage(1, CAT),)}),
        (0, 3, [1, 2, 3, 4], [5, 6], {}),
    )
    bins = read_images(shown, token_source="both")
    assert bins.turns == [(), ()]
    assert bins.served == sources([CAT], [])


def test_an_image_in_another_ones_place_fails_the_row_where_both_roads_are_asked():
    """It has the same tokens, so that the answer's are contiguous."""
    answer = gym_answer([([1, 9, 9, 2], [3]), ([1, 9, 9, 2, 3, 4], [5])])
    swapped = frame(
        (-1, 0, [1, 9, 9, 2], [3], {"images": (LedgerImage(1, CAT),)}),
        (0, 1, [1, 9, 9, 2, 3, 4], [5], {"images": (LedgerImage(1, DOG),)}),
    )
    assert len(read(answer, None).turns) == 2
    with pytest.raises(LedgerMismatchError, match="differ in"):
        read(answer, swapped, token_source="both")
    assert len(read(answer, swapped, token_source="ledger").turns) == 1


def test_side_calls_are_counted_and_left_out():
    trajectory = read(ANSWER, WITH_SIDE, token_source="ledger")
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert trajectory.side_trajectories == ()
    assert trajectory.notes == {"side_calls": 1, "calls_in_flight": 1}


@pytest.mark.parametrize("source", ["ledger", "both"])
def test_side_calls_are_kept_as_trajectories_beside_the_main_one(source):
    trajectory = read(ANSWER, WITH_SIDE, token_source=source, side_calls="keep")
    (side,) = trajectory.side_trajectories
    assert side.token_ids.tolist() == [1, 9, 8]
    assert side.logprobs.tolist() == [0, 0, -0.5]
    assert [(t.start, t.generation_start, t.end) for t in side.turns] == [(0, 2, 3)]
    assert trajectory.num_generated == 3


def test_an_answer_that_carries_tokens_says_which_chain_is_the_main_one():
    ledger = frame(
        (-1, 0, [7], [8], {}),
        (0, 2, [7, 8, 9], [6], {}),
        (-1, 0, [1, 2], [3], {}),
    )
    alone = read({"reward": 0}, ledger, token_source="ledger")
    assert alone.token_ids.tolist() == [7, 8, 9, 6]
    carried = read(gym_answer([([1, 2], [3])]), ledger, token_source="both", side_calls="keep")
    assert carried.token_ids.tolist() == [1, 2, 3]
    assert carried.notes == {"side_calls": 2}
    assert [side.token_ids.tolist() for side in carried.side_trajectories] == [[7, 8, 9, 6]]


def test_a_kept_branch_shows_turns_of_the_main_chain_as_prompt():
    ledger = frame((-1, 0, [1], [2], {}), (0, 2, [1, 2, 3], [4], {}), (0, 2, [1, 2, 8], [9], {}))
    trajectory = read({"reward": 0}, ledger, token_source="ledger", side_calls="keep")
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4]
    (side,) = trajectory.side_trajectories
    assert side.token_ids.tolist() == [1, 2, 8, 9]
    assert side.logprobs.tolist() == [0, 0, 0, -0.5]
    assert [(t.start, t.generation_start, t.end) for t in side.turns] == [(0, 3, 4)]


def test_flags_and_weight_versions_come_from_the_ledger():
    ledger = frame(
        (
            -1,
            0,
            [1],
            [2, 3],
            {"content": "<tool_call>{", "weight_versions": (("0", 0, 1), ("1", 1, 2))},
        ),
        (0, 3, [1, 2, 3, 4], [5], {"content": "</think> so", "weight_versions": (("1", 0, 1),)}),
    )
    trajectory = read({"reward": 1}, ledger, token_source="ledger")
    assert [t.is_invalid_tool_call for t in trajectory.turns] == [True, False]
    assert [t.has_malformed_thinking for t in trajectory.turns] == [False, True]
    assert trajectory.weight_versions == (
        WeightVersionSpan("0", 1, 2),
        WeightVersionSpan("1", 2, 3),
        WeightVersionSpan("1", 4, 5),
    )


@pytest.mark.parametrize(
    ("turns", "turn", "field", "position"),
    [
        ([([1, 2], [3]), ([1, 2, 3, 7], [5, 6])], 1, "prompt_token_ids", 3),
        ([([1, 2], [3]), ([1, 2, 3, 4], [5, 7])], 1, "generation_token_ids", 1),
        ([([1, 2], [3]), ([1, 2, 3, 4], [5])], 1, "generation_token_ids", 1),
        ([([1, 2], [3])], 1, "turns", 1),
        ([([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6], [1])], 2, "turns", 2),
    ],
)
def test_a_difference_fails_the_row_and_names_turn_field_and_place(turns, turn, field, position):
    with pytest.raises(LedgerMismatchError, match=r"row 7 .*turn") as caught:
        read(gym_answer(turns), TWO_TURNS, token_source="both")
    error = caught.value
    assert (error.turn, error.field, error.position) == (turn, field, position)
    assert error.kind == "data"


def test_a_changed_logprob_is_a_difference():
    answer = gym_answer([([1, 2], [3]), ([1, 2, 3, 4], [5, 6])])
    answer["response"]["output"][2]["generation_log_probs"] = [-0.5, -0.25]
    with pytest.raises(LedgerMismatchError) as caught:
        read(answer, TWO_TURNS, token_source="both")
    assert (caught.value.field, caught.value.expected[-1], caught.value.received[-1]) == (
        "generation_log_probs",
        -0.5,
        -0.25,
    )


@pytest.mark.parametrize("ledger", [None, frame()])
def test_a_rollout_whose_calls_never_came_fails_and_says_what_the_agent_must_do(ledger):
    with pytest.raises(NoGenerationError, match="/ng-rollout/<_ng_rollout_id>/v1"):
        read({"reward": 1.0}, ledger, token_source="ledger")


def test_a_prompt_that_left_no_room_is_a_placeholder():
    answer = {"reward": 0, "response": {"incomplete_details": {"reason": "max_output_tokens"}}}
    unanswered = frame((-1, 0, [1, 2], [], {}))
    known = read(answer, unanswered, token_source="ledger")
    assert known.placeholder
    assert known.token_ids.tolist() == [1, 2]
    assert known.notes == {"empty_generations": 1}
    unknown = read(answer, None, token_source="ledger")
    assert (unknown.placeholder, unknown.num_generated) == (True, 0)
