import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.benchmark import load_benchmark
from gymrl.errors import ConfigError
from gymrl.gym.embedded.base import Peers, RefusedRequest
from gymrl.gym.embedded.instructions import InstructionServer, read_constraints
from gymrl.gym.embedded.reply import Reply


def make_reply(text):
    content = [{"type": "output_text", "text": text}]
    return Reply(items=({"type": "message", "role": "assistant", "content": content},))


def kept(reply, kind, **fields):
    [constraint] = read_constraints([{"kind": kind, **fields}])
    return constraint.is_kept(reply)


def test_words_are_counted_between_their_limits():
    assert kept("one two, three's well-known", "word_count", least=4, most=4)
    assert not kept("one two three", "word_count", least=4)
    assert not kept("one two three", "word_count", most=2)


def test_a_word_counts_as_a_whole_in_any_case():
    assert kept("Stone on stone.", "includes", word="stone", times=2)
    assert not kept("stones and stonework", "includes", word="stone")
    assert kept("stones and stonework", "avoids", word="stone")
    assert not kept("A STONE!", "avoids", word="stone")


def test_letters_are_all_of_one_case():
    assert kept("all low, 3 times", "case", case="lower")
    assert not kept("Not low", "case", case="lower")
    assert kept("ALL UP!", "case", case="upper")
    assert not kept("123", "case", case="upper")


def test_forms_are_counted_exactly():
    assert kept("Intro\n- one\n- two\n-no bullet", "bullets", count=2)
    assert not kept("- one", "bullets", count=2)
    assert kept("one\n\ntwo\nstill two\n \nthree", "paragraphs", count=3)
    assert not kept("one\ntwo", "paragraphs", count=2)


def test_commas_and_endings_are_seen():
    assert kept("no commas here", "no_commas")
    assert not kept("one, two", "no_commas")
    assert kept("text. THAT IS ALL.", "ends_with", text="That is all.")
    assert not kept("That is all. Bye", "ends_with", text="That is all.")


def test_an_object_is_the_whole_reply_fence_or_not():
    assert kept('{"a": 1, "b": 2}', "json_object", keys=["a"])
    assert kept('```json\n{"a": 1}\n```', "json_object", keys=["a"])
    assert not kept('Here: {"a": 1}', "json_object", keys=["a"])
    assert not kept('{"b": 1}', "json_object", keys=["a"])
    assert not kept("[1]", "json_object")
    assert not kept("[" * 100_000, "json_object")


@pytest.mark.parametrize("kind", ["avoids", "no_commas", "paragraphs"])
def test_an_empty_reply_keeps_nothing(kind):
    fields = {"avoids": {"word": "x"}, "no_commas": {}, "paragraphs": {"count": 1}}[kind]

    assert not kept("", kind, **fields)


@pytest.mark.parametrize(
    "constraints", [None, [], [{"kind": "poem"}], [{"kind": "bullets"}], [{"word": "x"}]]
)
async def test_constraints_that_cannot_be_checked_are_refused_before_the_model_is_asked(
    constraints,
):
    server = InstructionServer("if", {}, Peers())
    with pytest.raises(RefusedRequest):
        await server.seed_session({"constraints": constraints})


def reply_to(constraints):
    """A reply that keeps all of them, built from what they say."""
    by_kind = {constraint["kind"]: constraint for constraint in constraints}
    words = ["plain"] * by_kind.get("word_count", {}).get("least", 1)
    if "includes" in by_kind:
        replaced = by_kind["includes"]
        words = (words + ["plain"] * 2)[2:] + [replaced["word"]] * replaced["times"]
    text = " ".join(words)
    form = by_kind.get("paragraphs") or by_kind.get("bullets")
    count = form["count"] if form else 0
    if "bullets" in by_kind:
        text += "".join("\n- x" for _ in range(count)) + "\n"
    if "paragraphs" in by_kind:
        text += "\n\nx" * (count - 1)
    text = f"{text} {by_kind.get('ends_with', {}).get('text', '')}".strip()
    case = by_kind.get("case", {}).get("case")
    return {"lower": text.lower(), "upper": text.upper(), None: text}[case]


@given(st.integers(0, 10_000), st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_every_generated_task_can_be_done(seed, count):
    params = {"num_instructions": count}
    [row] = load_benchmark("instruction_following", num_tasks=1, seed=seed, params=params).rows
    constraints = read_constraints(row["constraints"])

    reply = reply_to(row["constraints"])

    assert len(constraints) == count
    assert [c for c in constraints if not c.is_kept(reply)] == []
    assert msgspec.json.decode(json.dumps(row)) == row


@pytest.mark.parametrize(("scoring", "reward"), [("all", 0.0), ("share", 0.5)])
async def test_a_reply_that_keeps_half_earns_what_the_scoring_says(scoring, reward):
    server = InstructionServer("if", {"scoring": scoring}, Peers())
    row = {"constraints": [{"kind": "no_commas"}, {"kind": "case", "case": "upper"}]}

    verdict = await server.verify(row, make_reply("no commas"), None)

    assert verdict.reward == reward
    assert verdict.extras == {"kept": [True, False]}


@pytest.mark.parametrize(
    "params", [{"num_instructions": 0}, {"num_instructions": 7}, {"scoring": "x"}, {"words": 1}]
)
def test_parameters_out_of_range_are_refused(params):
    with pytest.raises(ConfigError, match=next(iter(params))):
        load_benchmark("instruction_following", params=params)


LONG = 200_000


@pytest.mark.parametrize(
    "constraint",
    [
        {"kind": "bullets", "count": 1},
        {"kind": "paragraphs", "count": 9},
        {"kind": "json_object"},
        {"kind": "word_count", "least": 9},
        {"kind": "includes", "word": "b"},
    ],
)
@pytest.mark.parametrize(
    "reply",
    ["a" + "\n" * LONG + "a", "```" + "\n" * LONG + "a", "a" + "\n " * LONG + "a", "a-" * LONG],
)
def test_no_reply_holds_a_verifier_for_long(constraint, reply):
    (kept,) = read_constraints([constraint])
    assert not kept.is_kept(reply) or constraint["kind"] == "word_count"
