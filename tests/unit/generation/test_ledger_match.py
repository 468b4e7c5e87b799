import pytest

from gymrl.errors import PrefixError
from gymrl.generation.base import Generated
from gymrl.generation.ledger import Answer, RolloutLedger
from gymrl.generation.ledger_match import answer_keys
from gymrl.generation.parsing import ParsedText, ToolCall
from gymrl.generation.policy import Conversation
from gymrl.generation.prefix import TruePrefix

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


def call(arguments, name="f"):
    return {"id": "any", "type": "function", "function": {"name": name, "arguments": arguments}}


def served(parsed: ParsedText, asked=ASKED, **more) -> RolloutLedger:
    ledger = RolloutLedger("r")
    keys = answer_keys(Conversation(messages=asked, **more), parsed)
    generated = Generated(token_ids=[8, 9], logprobs=[-1.0, -1.0], finish_reason="stop")
    ledger.record(ledger.begin(), [1, 2], generated, Answer(keys=tuple(keys)))
    return ledger


def continued(ledger, *messages, **more) -> Conversation:
    return Conversation(messages=[*ASKED, *messages], **more).in_rollout(ledger)


TRUE = TruePrefix([1, 2], [8, 9])
NEXT = {"role": "user", "content": "and?"}


@pytest.mark.parametrize("content", ["hello", " hello\n"])
def test_an_answer_is_known_by_its_text_without_white_space_around_it(content):
    ledger = served(ParsedText("hello\n"))
    found = continued(ledger, {"role": "assistant", "content": content}, NEXT)
    assert found.prefixes == {2: TRUE}
    assert not found.is_unmatched


def test_reasoning_that_the_agent_left_out_does_not_matter():
    ledger = served(ParsedText("hello", reasoning="long thought"))
    assert continued(ledger, {"role": "assistant", "content": "hello"}, NEXT).prefixes == {2: TRUE}


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": [2]}', '{"b":[2],"a":1}', {"a": 1, "b": [2]}])
def test_calls_are_known_by_name_and_arguments_however_they_are_written(arguments):
    ledger = served(ParsedText("", None, (ToolCall("f", '{"a": 1, "b": [2]}'),)), tools=[TOOL])
    message = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
    answer = {"role": "tool", "content": "3", "tool_call_id": "any"}
    assert continued(ledger, message, answer, tools=[TOOL]).prefixes == {2: TRUE}


def test_the_first_of_several_calls_alone_is_known_as_well():
    calls = (ToolCall("f", '{"a": 1}'), ToolCall("f", '{"a": 2}'))
    ledger = served(ParsedText("", None, calls))
    both = [call('{"a": 1}'), call('{"a": 2}')]
    for made in (both, both[:1]):
        message = {"role": "assistant", "content": "", "tool_calls": made}
        assert continued(ledger, message, NEXT).prefixes == {2: TRUE}
    message = {"role": "assistant", "content": "", "tool_calls": both[1:]}
    assert continued(ledger, message, NEXT).prefixes == {}


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [ASKED[0], {"role": "user", "content": "ho"}]},
        {"messages": ASKED[1:]},
        {"messages": [{"role": "user", "content": "be brief"}, ASKED[1]]},
        {"tools": [TOOL]},
        {"template_kwargs": {"enable_thinking": False}},
        {"answer": "hello!"},
        {"answer": "hel lo"},
        {"answer": ""},
    ],
)
def test_another_history_other_tools_or_another_text_is_no_match(change):
    ledger = served(ParsedText("hello"))
    message = {"role": "assistant", "content": change.pop("answer", "hello")}
    messages = [*change.pop("messages", ASKED), message, NEXT]
    found = Conversation(messages=messages, **change).in_rollout(ledger)
    assert found.prefixes == {}
    assert found.is_unmatched


def test_a_conversation_without_answers_is_not_called_unmatched():
    assert not continued(RolloutLedger("r")).is_unmatched


def test_the_most_recent_known_answer_is_continued():
    ledger = served(ParsedText("one"))
    history = [*ASKED, {"role": "assistant", "content": "one"}, NEXT]
    keys = answer_keys(Conversation(messages=history), ParsedText("two"))
    generated = Generated(token_ids=[7], logprobs=[-1.0], finish_reason="stop")
    ledger.record(ledger.begin(), [1, 2, 8, 9, 3], generated, Answer(keys=tuple(keys)))
    found = continued(ledger, *history[2:], {"role": "assistant", "content": "two"}, NEXT)
    assert found.prefixes == {4: TruePrefix([1, 2, 8, 9, 3], [7])}


def test_tokens_that_a_message_carries_count_as_they_are():
    carried = TruePrefix([5], [6])
    messages = [*ASKED, {"role": "assistant", "content": "an example"}, NEXT]
    conversation = Conversation(messages=messages, prefixes={2: carried})
    found = conversation.in_rollout(served(ParsedText("hello")))
    assert found.prefixes == {2: carried}
    assert not found.is_unmatched


def test_carried_tokens_that_were_not_served_are_refused_with_their_position():
    messages = [*ASKED, {"role": "assistant", "content": "hello"}, NEXT]
    conversation = Conversation(messages=messages, prefixes={2: TruePrefix([1, 2], [8, 7])})
    with pytest.raises(PrefixError, match="did not give") as caught:
        conversation.in_rollout(served(ParsedText("hello")))
    assert (caught.value.position, caught.value.expected, caught.value.received) == (3, [9], [7])


def test_of_equal_answers_the_carried_tokens_say_which_one_it_is():
    ledger = served(ParsedText("hello"))
    keys = answer_keys(Conversation(messages=ASKED), ParsedText("hello"))
    generated = Generated(token_ids=[8, 5], logprobs=[-1.0, -1.0], finish_reason="stop")
    ledger.record(ledger.begin(), [1, 2], generated, Answer(keys=tuple(keys)))
    messages = [*ASKED, {"role": "assistant", "content": "hello"}, NEXT]
    carried = Conversation(messages=messages, prefixes={2: TRUE}).in_rollout(ledger)
    assert carried.prefixes == {2: TRUE}
    plain = Conversation(messages=messages).in_rollout(ledger)
    assert plain.prefixes == {2: TruePrefix([1, 2], [8, 5])}


def test_an_answer_has_the_same_keys_whether_its_conversation_was_looked_for_or_not():
    messages = [*ASKED, {"role": "assistant", "content": "hello"}, NEXT]
    conversation = Conversation(messages=messages, tools=[TOOL])
    looked_for = conversation.in_rollout(served(ParsedText("hello"), tools=[TOOL]))
    assert looked_for.prefixes == {2: TRUE}
    parsed = ParsedText("", None, (ToolCall("f", "{}"), ToolCall("f", '{"a": 1}')))
    assert answer_keys(looked_for, parsed) == answer_keys(conversation, parsed)
    assert len(set(answer_keys(conversation, parsed))) == 2
