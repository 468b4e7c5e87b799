import json

import pytest

from gymrl.errors import ConfigError
from gymrl.scoring.answer import Answer
from gymrl.scoring.penalties import (
    PenaltyConfig,
    PenaltyTokenIds,
    apply_penalties,
    breaks_think_protocol,
    has_empty_answer,
    malformed_thinking,
    penalty_stats,
    repeats_reasoning,
    resolve_penalties,
    think_tag_ids,
    unwanted_tokens,
)
from tests.unit.scoring.samples import ledger, message, reasoning, result, trajectory

OPEN, CLOSE = 12, 13
TAGS = ("<think>", "</think>")
EMPTY = trajectory()


def view(*items):
    return Answer(json.dumps(result(*items)).encode())


def all_on(**fields):
    return PenaltyConfig(
        penalize_duplicated_reasoning=True,
        penalize_empty_final_answer=True,
        penalize_unwanted_tokens=True,
        penalize_malformed_think_tag=True,
        token_ids=PenaltyTokenIds(unwanted=(99,), think_open=OPEN, think_close=CLOSE),
        **fields,
    )


# Duplicated reasoning


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([reasoning(" a "), message("a")], True),
        ([reasoning("a"), message(" a\n")], True),
        ([reasoning("a"), {"content": "a"}], True),
        ([reasoning("a"), message("b")], False),
        ([reasoning("a"), {"type": "function_call"}, message("a")], False),
        ([reasoning("x"), message("y"), reasoning("a"), message("a")], True),
        ([reasoning(" "), message(" ")], False),
        ([{"type": "reasoning", "summary": None}, message("a")], False),
        ([{"type": "reasoning", "summary": []}, {"type": "message", "content": None}], False),
        ([reasoning("a")], False),
        ([reasoning("a"), None], False),
        ([], False),
    ],
)
def test_reasoning_repeated_by_the_next_item_is_a_fault(items, expected):
    assert repeats_reasoning(EMPTY, view(*items)) is expected


# Empty final answer


@pytest.mark.parametrize(
    "content", [None, "", "  \n", [], [{"text": " "}], [{"text": None}], {}, 5]
)
def test_a_final_message_without_text_is_empty(content):
    assert has_empty_answer(EMPTY, view(message("before"), {"type": "message", "content": content}))


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], True),
        ([reasoning("a")], True),
        ([message("a")], False),
        ([{"type": "message", "content": " a "}], False),
        ([{"content": "a"}], False),
        ([message("a"), reasoning("b")], False),
        ([message(""), {"type": "function_call"}], False),
        ([{"type": "function_call"}, {"type": "function_call_output", "output": "1"}], True),
    ],
)
def test_an_answer_is_empty_without_a_final_text_unless_a_call_is_last(items, expected):
    assert has_empty_answer(EMPTY, view(*items)) is expected


def test_a_final_observation_of_the_environment_is_not_the_models_answer():
    assert has_empty_answer(EMPTY, view(message(""), message("you won", role="user")))
    assert not has_empty_answer(EMPTY, view(message("done"), message("", role="user")))


# Unwanted tokens


def test_an_unwanted_token_counts_anywhere_in_a_generation_and_nowhere_else():
    unwanted = unwanted_tokens((99, 98))
    assert unwanted(trajectory(pairs=(((1,), (99, 4)),)), view())
    assert unwanted(trajectory(pairs=(((1,), (4, 99)),)), view())
    assert unwanted(trajectory(pairs=(((1,), (4,)), ((5,), (98,)))), view())
    assert not unwanted(trajectory(pairs=(((99,), (4,)), ((98,), (5,)))), view())
    assert not unwanted(trajectory(pairs=()), view())


def test_unwanted_ids_are_required():
    with pytest.raises(ConfigError, match=r"token_ids\.unwanted"):
        PenaltyConfig(penalize_unwanted_tokens=True)


# Malformed thinking


@pytest.mark.parametrize(
    ("prompt", "generation", "fault"),
    [
        ((1, OPEN), (5, CLOSE, 6), False),  # thinking: opened by the prompt, closed once
        ((1, OPEN), (5, 6), True),  # never closed
        ((1, OPEN), (5, CLOSE, 6, CLOSE), True),  # closed twice
        ((1, OPEN), (OPEN, 5, CLOSE), True),  # opened again
        ((1, OPEN, CLOSE), (5, 6), False),  # not thinking
        ((1, OPEN, CLOSE), (5, CLOSE), True),
        ((1, OPEN, CLOSE), (OPEN, 5), True),
        ((1,), (5, 6), False),
        ((1,), (CLOSE,), True),
        ((OPEN, OPEN), (5, CLOSE), True),  # no such prompt
        ((OPEN, OPEN), (CLOSE, CLOSE), True),
        ((CLOSE,), (5,), True),
    ],
)
def test_tag_tokens_follow_what_the_prompt_opened(prompt, generation, fault):
    attempt = trajectory(pairs=((prompt, generation),))
    assert breaks_think_protocol(attempt, (OPEN, CLOSE)) is fault


def test_every_turn_is_checked_against_its_own_prompt():
    good = ((1, OPEN), (5, CLOSE, 6))
    assert not breaks_think_protocol(
        trajectory(pairs=(good, ((7, OPEN), (CLOSE, 8)))), (OPEN, CLOSE)
    )
    assert breaks_think_protocol(trajectory(pairs=(good, ((7, OPEN), (8,)))), (OPEN, CLOSE))


def test_a_turn_without_a_generation_is_no_fault():
    assert not breaks_think_protocol(trajectory(pairs=(((1, OPEN), ()),)), (OPEN, CLOSE))


def test_the_flag_of_a_turn_is_honored():
    malformed = malformed_thinking(None, TAGS)
    assert malformed(trajectory(flags=[True]), view())
    assert not malformed(trajectory(flags=[False]), view())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("so it is</think>4", False),
        ("4", False),
        ("<think>so", True),
        ("a</think>b</think>", True),
        (None, False),
    ],
)
def test_a_tag_spelled_with_ordinary_tokens_is_found_in_the_text(text, fault):
    malformed = malformed_thinking(None, TAGS)
    assert malformed(trajectory(texts=[text]), view()) is fault
    assert malformed(trajectory(), view({"type": "message", "generation_str": text})) is fault


def test_a_double_think_is_one_fault_and_one_penalty():
    # huggingface/trl#6361: a template that yields the tags twice.
    penalties = resolve_penalties(PenaltyConfig(penalize_malformed_think_tag=True))
    attempt = trajectory(texts=["<think></think>x</think>"], flags=[True])
    assert ledger(apply_penalties(attempt, view(message("x")), penalties)) == [
        ("malformed_think_tag", 0.0)
    ]


# Resolution


def test_tag_ids_come_from_single_tokens_only():
    ids = {"<think>": [7], "</think>": [8]}
    assert think_tag_ids(PenaltyConfig(), ids.__getitem__) == (7, 8)
    assert think_tag_ids(PenaltyConfig(), {**ids, "</think>": [8, 9]}.__getitem__) is None
    assert think_tag_ids(PenaltyConfig(), {**ids, "<think>": []}.__getitem__) is None
    assert think_tag_ids(PenaltyConfig(), None) is None


def test_configured_tag_ids_win_over_the_tokenizer():
    given = PenaltyConfig(token_ids=PenaltyTokenIds(think_open=OPEN))
    assert think_tag_ids(given, {"</think>": [8]}.__getitem__) == (OPEN, 8)
    both = PenaltyConfig(token_ids=PenaltyTokenIds(think_open=OPEN, think_close=CLOSE))
    assert think_tag_ids(both, None) == (OPEN, CLOSE)


def test_other_tags_are_resolved_by_their_own_text():
    config = PenaltyConfig(thinking_tags=("<r>", "</r>"))
    assert think_tag_ids(config, {"<r>": [1], "</r>": [2]}.__getitem__) == (1, 2)


def test_the_tokenizer_is_asked_once_for_a_run():
    asked = []

    def encode(text):
        asked.append(text)
        return [len(asked)]

    penalties = resolve_penalties(PenaltyConfig(penalize_malformed_think_tag=True), encode)
    for _ in range(3):
        apply_penalties(trajectory(), view(message("x")), penalties)
    assert asked == ["<think>", "</think>"]


def test_tags_that_are_several_tokens_leave_the_other_checks_standing():
    config = PenaltyConfig(penalize_malformed_think_tag=True)
    penalties = resolve_penalties(config, lambda text: list(range(len(text))))
    attempt = trajectory(pairs=(((OPEN,), (5,)),), texts=["<think>"])
    assert ledger(apply_penalties(attempt, view(), penalties)) == [("malformed_think_tag", 0.0)]


def test_no_configuration_and_no_flag_mean_no_penalty():
    assert resolve_penalties(None) == ()
    assert resolve_penalties(PenaltyConfig()) == ()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"penalise_empty_final_answer": True}, "penalise_empty_final_answer"),
        ({"token_ids": {"eos": 2}}, "eos"),
        ({"token_ids": {"unwanted": [-1]}}, "token_ids"),
        ({"thinking_tags": ["<t>", "<t>"]}, "thinking_tags"),
        ({"thinking_tags": ["", "</t>"]}, "thinking_tags"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(values, named):
    with pytest.raises(ConfigError, match=named):
        PenaltyConfig.from_dict(values)


# Application and rates


def test_a_penalty_keeps_the_verifiers_reward():
    penalties = resolve_penalties(PenaltyConfig(penalize_empty_final_answer=True))
    scored = apply_penalties(trajectory(1.0), view(), penalties)
    assert scored.reward.total == 0.0
    assert scored.reward.verifier == 1.0


def test_each_penalty_speaks_once_and_in_order():
    penalties = resolve_penalties(all_on())
    attempt = trajectory(1.0, pairs=(((1,), (99, 99, CLOSE)), ((2,), (99,))))
    scored = apply_penalties(attempt, view(reasoning("a"), message("a"), message("")), penalties)
    assert ledger(scored) == [
        ("duplicated_reasoning", 0.0),
        ("empty_final_answer", 0.0),
        ("unwanted_token", 0.0),
        ("malformed_think_tag", 0.0),
    ]


def test_a_faultless_answer_comes_back_as_it_is():
    attempt = trajectory(1.0)
    assert apply_penalties(attempt, view(message("x")), resolve_penalties(all_on())) is attempt


def test_rates_have_the_legacy_names_and_report_zero():
    penalties = resolve_penalties(all_on())
    attempts = [
        apply_penalties(trajectory(1.0), view(), penalties),
        apply_penalties(trajectory(1.0, pairs=(((1,), (99,)),)), view(message("x")), penalties),
        apply_penalties(trajectory(1.0), view(message("x")), penalties),
        apply_penalties(trajectory(1.0), view(message(" ")), penalties),
    ]
    assert penalty_stats(attempts, penalties).scalars() == {
        "reasoning_equal_to_final_answer_rate": 0.0,
        "empty_final_answer_rate": 0.5,
        "unwanted_token_rate": 0.25,
        "malformed_think_tag_rate": 0.0,
    }


def test_only_penalties_that_are_on_have_a_rate():
    penalties = resolve_penalties(PenaltyConfig(penalize_empty_final_answer=True))
    assert penalty_stats([trajectory()], penalties).scalars() == {"empty_final_answer_rate": 0.0}
    assert penalty_stats([], penalties).scalars() == {}
