"""Routes of ``/run`` answers and of ledgers, along the turns of a trajectory."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.actors.codec import RoundTrip
from gymrl.config import GenerationConfig, GymConfig, RolloutConfig
from gymrl.errors import ConfigError, RoutedExpertsError
from gymrl.generation.base import Generated
from gymrl.generation.ledger import RolloutLedger
from gymrl.gym.episode import EpisodeOptions, read_episode
from gymrl.routed_experts import encode_routes
from gymrl.token_ledger import LedgerFrame
from gymrl.types import RowResult

PROMPTS = ([1, 2, 3], [1, 2, 3, 4, 5, 6])
SAMPLES = ([4, 5], [7, 8, 9])


def rows(first: int, count: int, dtype: str = "int8") -> np.ndarray:
    """``[count, 1, 2]``: two experts a token, the first one telling call and row."""
    ids = first + np.arange(count)
    return np.stack([ids, ids * 0], axis=1).reshape(count, 1, 2).astype(dtype)


def item(prompt, sample, routed_experts=None, **fields) -> dict:
    made = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "hm", "annotations": []}],
        "prompt_token_ids": prompt,
        "generation_token_ids": sample,
        "generation_log_probs": [-0.5] * len(sample),
        **fields,
    }
    if routed_experts is not None:
        made["routed_experts"] = routed_experts
    return made


def answer(*items, **fields) -> bytes:
    return json.dumps({"reward": 1.0, "response": {"output": list(items)}, **fields}).encode()


def read(body: bytes, ledger=None, **options):
    return read_episode(body, agent="a", row=7, options=EpisodeOptions(**options), ledger=ledger)


def two_turns(*routed) -> bytes:
    made = [item(p, s, r) for p, s, r in zip(PROMPTS, SAMPLES, routed, strict=True)]
    tool = {"type": "function_call_output", "call_id": "c", "output": "6"}
    return answer(made[0], tool, made[1])


FIRST, SECOND = rows(10, 5), rows(50, 9)
EXPECTED = [10, 11, 12, 13, 54, 55, 56, 57, 58]


@pytest.mark.parametrize(
    "form", [encode_routes, lambda routes: routes.tolist()], ids=["envelope", "lists"]
)
def test_each_turn_brings_the_routes_of_its_tokens_and_mends_the_one_before(form):
    trajectory = read(two_turns(form(FIRST), form(SECOND)))

    assert trajectory.routed_experts[:, 0, 0].tolist() == EXPECTED
    assert trajectory.routed_experts.shape == (9, 1, 2)
    assert trajectory.notes == {}


def test_the_envelopes_type_is_kept_unless_one_is_set():
    body = two_turns(encode_routes(FIRST), encode_routes(SECOND))

    assert read(body).routed_experts.dtype == np.int8
    assert read(body, routed_experts_dtype="int32").routed_experts.dtype == np.int32


def test_the_result_does_not_repeat_the_routes():
    trajectory = read(two_turns(encode_routes(FIRST), SECOND.tolist()))

    kept = json.loads(trajectory.result)
    assert [sorted(i) for i in kept["response"]["output"]] == [
        ["content", "role", "type"],
        ["call_id", "output", "type"],
        ["content", "role", "type"],
    ]


def test_a_long_answer_gives_the_same_routes():
    num = 30_000
    prompt, sample = list(range(num)), [5, 6]
    routes = rows(0, num + 2, "int32")
    body = answer(item(prompt, sample, encode_routes(routes), extra="kept"))

    trajectory = read(body)

    assert trajectory.routed_experts.tolist() == routes.tolist()
    assert json.loads(trajectory.result)["response"]["output"][0]["extra"] == "kept"
    assert b"nrlre1" not in trajectory.result


@pytest.mark.parametrize(("count", "turn"), [(4, 0), (8, 1)])
def test_one_row_too_few_fails_the_row_with_both_numbers(count, turn):
    given = [FIRST, SECOND]
    given[turn] = given[turn][:count]

    with pytest.raises(RoutedExpertsError) as caught:
        read(two_turns(*(encode_routes(r) for r in given)))

    error = caught.value
    assert (error.row, error.turn, error.agent) == (7, turn, "a")
    assert (error.received, error.expected) == (count, count + 1)
    assert f"row 7 (agent 'a'), turn {turn}" in str(error)
    assert f"{count} rows of routes for {count + 1} tokens" in str(error)


def test_one_row_too_many_is_left_out():
    body = two_turns(encode_routes(rows(10, 6)), encode_routes(rows(50, 12)))

    assert read(body).routed_experts[:, 0, 0].tolist() == EXPECTED


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1, 2], [3, 4]], "rank 2"),
        ("nrlre1:uint8:5x1x2:AAAAAAAAAAAAAA==", "dtype is 'uint8'"),
        ("nrlre1:int8:5x1x2:AAAA", "3 elements of int8 where its shape 5x1x2 says 10"),
        ("what?", "begins with 'what?'"),
        (7, "rank 0"),
        ({"a": 1}, "rank 0"),
        ([], "without an element"),
    ],
)
def test_malformed_routes_fail_the_row_and_name_the_turn(value, message):
    with pytest.raises(RoutedExpertsError) as caught:
        read(two_turns(encode_routes(FIRST), value))

    assert caught.value.turn == 1
    assert message in str(caught.value)


def test_experts_of_another_model_in_a_later_turn_fail_the_row():
    other = np.zeros((9, 1, 4), dtype=np.int8)

    with pytest.raises(RoutedExpertsError, match=r"\[1, 4\].*follow routes of shape \[1, 2\]"):
        read(two_turns(encode_routes(FIRST), encode_routes(other)))


def test_an_expert_id_beyond_the_set_type_fails_the_row_instead_of_wrapping():
    lists = [[[255, 256]]] * 5

    assert read(two_turns(lists, None)).routed_experts.dtype == np.int16
    with pytest.raises(RoutedExpertsError, match="expert id 256 does not fit int8"):
        read(two_turns(lists, None), routed_experts_dtype="int8")


def test_a_turn_without_routes_is_missing_and_counted():
    """NVIDIA-NeMo/RL#3378: a first turn whose routes were lost beside a second that has them."""
    trajectory = read(two_turns(None, encode_routes(SECOND)))

    assert trajectory.routed_experts[:, 0, 0].tolist() == [-1, -1, -1, -1, -1, 55, 56, 57, 58]
    assert trajectory.routed_experts.dtype == np.int8
    assert trajectory.notes == {"turns_without_routes": 1}


def test_without_any_routes_there_are_none():
    trajectory = read(two_turns(None, None))

    assert trajectory.routed_experts is None
    assert trajectory.notes == {}


@pytest.mark.parametrize("given", [(None, None), (encode_routes(FIRST), None)])
def test_a_turn_without_required_routes_fails_the_row_and_names_the_switches(given):
    with pytest.raises(RoutedExpertsError) as caught:
        read(two_turns(*given), require_routed_experts=True)

    assert caught.value.turn == (0 if given[0] is None else 1)
    for name in ("return_routed_experts", "--enable-return-routed-experts", "the agent"):
        assert name in str(caught.value)


def test_required_routes_that_are_there_are_taken():
    body = two_turns(encode_routes(FIRST), encode_routes(SECOND))

    trajectory = read(body, require_routed_experts=True)

    assert trajectory.routed_experts[:, 0, 0].tolist() == EXPECTED


def test_a_placeholder_needs_no_routes():
    body = answer(item([1, 2], []))
    body = json.dumps(
        json.loads(body) | {"response": {"output": [], "incomplete_details": {"reason": "length"}}}
    ).encode()

    trajectory = read(body, require_routed_experts=True)

    assert trajectory.placeholder
    assert trajectory.routed_experts is None


def ledger_of(*calls) -> LedgerFrame:
    ledger = RolloutLedger("r")
    for prompt, sample, routes in calls:
        generated = Generated(
            token_ids=sample,
            logprobs=[-0.5] * len(sample),
            finish_reason="stop",
            routed_experts=routes,
        )
        ledger.record(ledger.begin(), prompt, generated)
        ledger.end()
    return LedgerFrame.decode(ledger.frame("s").encode())


TWO_CALLS = list(zip(PROMPTS, SAMPLES, (FIRST, SECOND), strict=True))


def test_the_ledger_gives_the_same_routes_as_the_answer():
    body = two_turns(encode_routes(FIRST), encode_routes(SECOND))

    told = read(body, ledger_of(*TWO_CALLS), token_source="ledger", require_routed_experts=True)

    assert told.routed_experts.tolist() == read(body).routed_experts.tolist()
    assert told.routed_experts.dtype == np.int8


def test_an_agent_that_dropped_the_routes_gets_them_from_the_ledger():
    """NVIDIA-NeMo/RL#2849: a list of allowed keys on the way left the routes out."""
    told = read(
        two_turns(None, None),
        ledger_of(*TWO_CALLS),
        token_source="both",
        require_routed_experts=True,
        routed_experts_dtype="int16",
    )

    assert told.routed_experts[:, 0, 0].tolist() == EXPECTED
    assert told.routed_experts.dtype == np.int16
    assert told.notes == {}


def test_a_call_without_routes_in_the_ledger_is_missing_and_counted_or_refused():
    frame = ledger_of((PROMPTS[0], SAMPLES[0], None), TWO_CALLS[1])
    body = answer()

    told = read(body, frame, token_source="ledger")
    assert told.routed_experts[:, 0, 0].tolist() == [-1, -1, -1, -1, -1, 55, 56, 57, 58]
    assert told.notes == {"turns_without_routes": 1}
    with pytest.raises(RoutedExpertsError) as caught:
        read(body, frame, token_source="ledger", require_routed_experts=True)
    assert caught.value.turn == 0


def test_a_side_trajectory_has_its_routes_too():
    side = ([1, 2, 9], [8], rows(90, 4))

    told = read(answer(), ledger_of(*TWO_CALLS, side), token_source="ledger", side_calls="keep")

    (kept,) = told.side_trajectories
    assert kept.token_ids.tolist() == [1, 2, 9, 8]
    assert kept.routed_experts[:, 0, 0].tolist() == [10, 11, 92, 93]


def test_an_expert_id_beyond_the_set_type_in_a_ledger_fails_the_row():
    wide = ([1, 2], [3], np.full((3, 1, 2), 300, dtype=np.int16))

    with pytest.raises(RoutedExpertsError, match="expert id 300 does not fit int8"):
        read(answer(), ledger_of(wide), token_source="ledger", routed_experts_dtype="int8")


def test_routes_cross_between_processes_out_of_band_in_their_type():
    trajectory = read(two_turns(encode_routes(FIRST), encode_routes(SECOND)))
    result = RowResult(index=0, agent="a", outcome=trajectory)

    again = RoundTrip().round_trip(result, RowResult).outcome

    assert again.routed_experts.dtype == np.int8
    assert again.routed_experts.tolist() == trajectory.routed_experts.tolist()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_routes_of_any_episode_are_those_of_a_naive_walk(data):
    sequence, items, naive, before = [], [], [], False
    for number in range(data.draw(st.integers(1, 4))):
        prompt = sequence + data.draw(st.lists(st.integers(0, 9), max_size=3))
        sample = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        whole, has_routes = prompt + sample, data.draw(st.booleans())
        routes = rows(1000 * (number + 1), len(whole), "int16")
        form = encode_routes(routes) if data.draw(st.booleans()) else routes.tolist()
        items.append(item(prompt, sample, form if has_routes else None))
        if has_routes and before:
            naive[-1] = 1000 * (number + 1) + len(sequence) - 1
        start = len(sequence)
        naive += [1000 * (number + 1) + p if has_routes else -1 for p in range(start, len(whole))]
        sequence, before = whole, has_routes

    trajectory = read(answer(*items))

    found = trajectory.routed_experts
    if found is None:
        assert set(naive) == {-1}
    else:
        assert found[:, 0, 0].tolist() == naive


def test_router_replay_and_truncated_prefixes_are_refused_together():
    with pytest.raises(ConfigError, match=r"on_broken_prefix='truncate'.*router replay"):
        GymConfig(require_routed_experts=True, on_broken_prefix="truncate")
    with pytest.raises(ConfigError, match=r"gym.on_broken_prefix='truncate'.*router replay"):
        RolloutConfig(
            generation=GenerationConfig(model="m", return_routed_experts=True),
            gym=GymConfig(on_broken_prefix="truncate"),
        )


def test_required_routes_need_a_generator_that_returns_them():
    with pytest.raises(
        ConfigError, match=r"generation.return_routed_experts=False.*set it to true"
    ):
        RolloutConfig(
            generation=GenerationConfig(model="m"), gym=GymConfig(require_routed_experts=True)
        )


def test_only_the_three_types_can_be_set():
    with pytest.raises(ConfigError, match="routed_experts_dtype"):
        GymConfig.from_dict({"routed_experts_dtype": "uint8"})


def test_the_options_of_an_episode_are_those_of_the_worker():
    config = GymConfig(require_routed_experts=True, routed_experts_dtype="int32")

    options = EpisodeOptions.of(config)

    assert options.require_routed_experts
    assert options.routed_experts_dtype == "int32"
    assert msgspec.structs.asdict(options)["on_broken_prefix"] == "error"
