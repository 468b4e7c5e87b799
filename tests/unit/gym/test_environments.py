"""The shipped environments, their calculator and their scorers, without sockets."""

import time
from pathlib import Path

import msgspec
import pytest

from gymrl.errors import ConfigError
from gymrl.gym.embedded import Peers, Reply, ResourcesServer, Verdict, tool
from gymrl.gym.embedded.arithmetic import ArithmeticProblem, evaluate, shown
from gymrl.gym.embedded.base import RefusedRequest
from gymrl.gym.embedded.reasoning_gym import ReasoningGymServer, extract_answer
from gymrl.gym.embedded.sessions import SessionStates
from gymrl.gym.embedded.simple_agent import summed
from gymrl.gym.embedded.tool_arithmetic import ToolArithmeticServer


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 * 14 + 2", "44"),
        ("(1 + 2) * -3", "-9"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 10", "1024"),
        (" +1.5e2 ", "150"),
        ("10**50", str(10**50)),
    ],
)
def test_the_calculator_computes(expression, value):
    assert shown(evaluate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "x",
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "[1][0]",
        "1 if 1 else 2",
        "1 < 2",
        "True",
        "'a' * 3",
        "1j",
        "1 / 0",
        "0 ** -1",
        "(-8) ** 0.5",
        "9 ** 9 ** 9",
        "2 ** 1000",
        "1e308 * 10",
        "10 ** 100",
        "9" * 2000,
        "(" * 500 + "1" + ")" * 500,
        "-" * 900 + "1",
        "+".join("1" for _ in range(400)),
        "1 << 9",
        "1\n2",
        "\x00",
    ],
)
def test_the_calculator_refuses_what_is_no_bounded_arithmetic_and_quickly(expression):
    started = time.process_time()
    with pytest.raises(ArithmeticProblem):
        evaluate(expression)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("extractor", "reply", "answer"),
    [
        ("whole", "  a b \n", "a b"),
        ("whole", "  ", None),
        ("last_integer", "1 + 2 is 3.", "3"),
        ("last_integer", "it is -12", "-12"),
        ("last_integer", "none", None),
        ("first_word", "Yes, it is", "Yes"),
        ("first_word", "'42'.", "42"),
        ("first_word", "", None),
        ("first_word", "...", None),
        ("answer_tag", "<answer> 4 </answer>", "4"),
        ("answer_tag", "<answer>1</answer> no: <ANSWER>2\n3</ANSWER>", "2\n3"),
        ("answer_tag", "4", None),
        ("answer_tag", "<answer>4", None),
    ],
)
def test_answers_are_extracted(extractor, reply, answer):
    assert extract_answer(reply, extractor) == answer


def said(text):
    message = {"type": "message", "role": "assistant", "content": [{"text": text}]}
    return Reply(items=(message,))


def reasoning_server(**settings):
    return ReasoningGymServer("reason", settings, Peers())


def row(answer="2", dataset="chain_sum"):
    entry = {"question": "1 + 1 =", "answer": answer, "metadata": {"difficulty": {}}}
    return {"dataset": dataset, "entry": entry}


@pytest.mark.parametrize(("reply", "reward"), [("It is 2", 1.0), ("It is 3", 0.0), ("two", 0.0)])
async def test_a_reply_is_scored_by_the_datasets_own_scorer(reply, reward):
    server = reasoning_server(answer_extractor="last_integer")
    verdict = await server.verify(row(), said(reply), None)
    assert verdict.reward == reward
    assert "scorer_error" not in verdict.extras


async def test_a_scorer_that_raises_is_a_wrong_answer_and_says_so():
    server = reasoning_server(answer_extractor="whole")
    odd = row(answer="2 x 3", dataset="prime_factorization")
    verdict = await server.verify(odd, said("two times three"), None)
    assert verdict.reward == 0.0
    assert verdict.extras["scorer_error"].startswith("ValueError: invalid literal for int()")


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (row(answer=None), "has no answer"),
        (row(dataset="no_such"), "no dataset 'no_such'"),
        ({"dataset": "chain_sum"}, "has no answer"),
        ({"dataset": None, "entry": {}}, "no dataset None"),
    ],
)
async def test_an_entry_that_cannot_be_scored_is_refused_when_the_session_is_seeded(bad, text):
    with pytest.raises(RefusedRequest, match=text):
        await reasoning_server().seed_session(bad)


def test_an_unknown_extractor_names_instance_and_setting():
    with pytest.raises(ConfigError, match=r"'reason'.*answer_extractor"):
        reasoning_server(answer_extractor="guess")


TABLE = {"table": {"pens": 14, "inks": 2.5}, "expected_answer": 42}


def tool_server():
    return ToolArithmeticServer("arith", {}, Peers())


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("42", 1.0),
        ("The answer is 42.", 1.0),
        ("first 41, then 42.0", 1.0),
        ("42, or was it 43?", 0.0),
        ("-42", 0.0),
        ("no idea", 0.0),
        ("", 0.0),
        ("9" * 400, 0.0),
    ],
)
async def test_the_last_number_of_the_final_message_is_the_answer(reply, reward):
    verdict = await tool_server().verify(TABLE, said(reply), None)
    assert verdict.reward == reward
    assert msgspec.json.encode(verdict.extras)


async def test_thousands_may_be_set_apart():
    verdict = await tool_server().verify({"expected_answer": 1234567}, said("1,234,567"), None)
    assert verdict.reward == 1.0


async def test_lookup_and_calculator_answer_from_the_sessions_table():
    server = tool_server()
    state = await server.seed_session(TABLE)
    assert await server.lookup(state, " Pens ") == "14"
    assert await server.calculator(state, "14 * 3") == "42"
    with pytest.raises(Exception, match="no entry 'oars'; entries: inks, pens"):
        await server.lookup(state, "oars")
    with pytest.raises(Exception, match="cannot compute"):
        await server.calculator(state, "import os")


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"table": None},
        {"table": {"a": "1"}},
        {"table": {"a": True}},
        {"table": {}, "expected_answer": None},
        {"table": {}, "expected_answer": float("nan")},
    ],
)
async def test_a_row_without_table_or_answer_is_refused(bad):
    with pytest.raises(RefusedRequest):
        await tool_server().seed_session(bad)


def test_the_reply_knows_texts_and_tool_calls_and_no_tokens():
    response = {
        "output": [
            {"type": "reasoning", "summary": [{"text": "hm"}]},
            {
                "type": "function_call",
                "name": "f",
                "arguments": "{}",
                "call_id": "c",
                "prompt_token_ids": [1],
            },
            {"type": "function_call_output", "call_id": "c", "output": "3"},
            {"type": "message", "role": "assistant", "content": [{"text": "a"}, {"text": "b"}]},
            {"type": "message", "role": "user", "content": "not mine"},
        ],
        "incomplete_details": {"reason": "length"},
    }
    reply = Reply.of(msgspec.Raw(msgspec.json.encode(response)))
    assert reply.text == "ab"
    assert [(c.name, c.arguments, c.output) for c in reply.tool_calls] == [("f", "{}", "3")]
    assert reply.incomplete_reason == "length"
    assert "prompt_token_ids" not in reply.items[1]


def test_a_reply_without_messages_has_no_text():
    assert Reply(items=()).text == ""


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_verdict_is_finite(bad):
    with pytest.raises(ValueError, match="finite"):
        Verdict(reward=bad)
    with pytest.raises(ValueError, match="finite"):
        Verdict(reward=1.0, components={"a": bad})


@pytest.mark.parametrize("bad", [True, "1.0", None])
def test_a_verdict_is_a_number(bad):
    with pytest.raises(TypeError, match=r"use float\(\)"):
        Verdict(reward=bad)


def test_a_tool_may_not_be_called_like_a_route_of_the_protocol():
    class Clash(ResourcesServer):
        @tool
        async def verify(self, state: None) -> str:
            return ""

    with pytest.raises(ConfigError, match="no tool may be called 'verify'"):
        Clash("clash", {}, Peers())


def test_the_oldest_of_too_many_sessions_is_dropped():
    states = SessionStates(limit=2)
    for name in ("a", "b", "c"):
        states.put(name, name)
    assert ("a" in states, "b" in states, "c" in states, len(states)) == (False, True, True, 2)
    assert states.pop("b") == "b"
    assert states.pop("b") is None


def test_usage_counts_inside_details_are_summed_and_null_is_nothing():
    first = {"input_tokens": 3, "details": {"cached": None, "reasoning": 1}, "note": "x"}
    second = {"input_tokens": 4, "details": {"cached": 2, "reasoning": 1}, "extra": 5}
    assert summed(summed({}, first), second) == {
        "input_tokens": 7,
        "details": {"cached": 2, "reasoning": 2},
        "note": "x",
        "extra": 5,
    }
    assert summed(first, None) == first


def test_the_peers_of_an_instance_take_turns_and_an_unknown_one_lists_the_known():
    peers = Peers()
    peers.set("policy_model", "http://a/", "http://b")
    assert [peers.url("policy_model") for _ in range(3)] == ["http://a", "http://b", "http://a"]
    with pytest.raises(ConfigError, match="'nope'; known: policy_model"):
        peers.url("nope")


def test_nothing_of_reasoning_gym_is_imported_elsewhere():
    package = Path(__file__).parents[3] / "gymrl" / "gym"
    importing = [
        path.name
        for path in package.rglob("*.py")
        if any(
            line.strip().startswith(("import reasoning_gym", "from reasoning_gym"))
            for line in path.read_text().splitlines()
        )
    ]
    assert importing == ["reasoning_gym.py"]


LONG = 200_000


def test_a_reply_of_opening_tags_is_searched_once():
    assert extract_answer("<answer>" * LONG, "answer_tag") is None
    assert extract_answer("<answer>a" * LONG + "</answer>", "answer_tag") is not None


def test_tags_are_paired_from_the_front():
    reply = "<answer>1</answer> <ANSWER> 2 <answer>3</Answer> 4</answer>"
    assert extract_answer(reply, "answer_tag") == "2 <answer>3"
