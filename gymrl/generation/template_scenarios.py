"""Conversations of the kinds that agents have, played through a chat template without a model.

The prompt of a first call, an answer the way the model would spell it, the prompt of the next call,
and so on: what the template does to the history shows at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gymrl.errors import GenerationRequestError, PrefixError
from gymrl.generation.findings import Finding
from gymrl.generation.prefix import TruePrefix

if TYPE_CHECKING:
    from gymrl.generation.chat import ChatFormat
    from gymrl.generation.template_messages import Message

Use = Literal["turns", "tools", "reasoning"]
ALL_USES: frozenset[Use] = frozenset({"turns", "tools", "reasoning"})

PLACE = "Zürich"
TEMPERATURE = "minus 7"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}},
            "required": ["city"],
        },
    },
}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to check.

    Attributes:
        name: As findings say it.
        messages: Its assistant messages are answers of the model.
        answers: By place of an assistant message: the text as the model would sample it, without
            the end of turn.
        tools: Offered.
        uses: What a run must do to have such conversations.
    """

    name: str
    messages: list[dict[str, Any]]
    answers: dict[int, str]
    tools: list[dict[str, Any]] = []
    uses: frozenset[Use] = frozenset()


def scenarios(chat: ChatFormat) -> Iterator[Scenario]:
    """Conversations of every kind that the format has."""
    user = {"role": "user", "content": "How cold is it?"}
    more = {"role": "user", "content": "And tomorrow?"}
    yield Scenario(
        name="several user turns",
        messages=[user, said("It is cold."), more, said("Colder."), user],
        answers={1: "It is cold.", 3: "Colder."},
        uses=frozenset({"turns"}),
    )
    if chat.tool_parser != "none":
        yield from _tool_scenarios(chat, user, more)
    if chat.reasoning_parser != "none":
        thought = said("Cold.", reasoning="It is winter.")
        text = spelled(chat, thought)
        yield Scenario(
            name="reasoning, then another user turn",
            messages=[user, thought, more, thought, user],
            answers={1: text, 3: text},
            uses=frozenset({"turns", "reasoning"}),
        )


def _tool_scenarios(chat: ChatFormat, user: Message, more: Message) -> Iterator[Scenario]:
    answer = {"role": "tool", "content": TEMPERATURE, "tool_call_id": "call_1"}
    calls = [said("", calls=True)]
    if chat.reasoning_parser != "none":
        calls.append(said("", reasoning="I should look.", calls=True))
    for call in calls:
        uses: frozenset[Use] = frozenset({"tools"})
        name = "a loop of tool calls"
        if "reasoning_content" in call:
            uses, name = uses | {"reasoning"}, "reasoning in a loop of tool calls"
        text = spelled(chat, call)
        yield Scenario(
            name=name,
            messages=[user, call, answer, call, answer],
            answers={1: text, 3: text},
            tools=[TOOL],
            uses=uses,
        )
        yield Scenario(
            name=f"{name}, then another user turn",
            messages=[user, call, answer, said("Cold."), more, call, answer],
            answers={1: text, 3: "Cold.", 5: text},
            tools=[TOOL],
            uses=uses | {"turns"},
        )


def said(content: str, *, reasoning: str | None = None, calls: bool = False) -> Message:
    """An answer of the model."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        function = {"name": "get_weather", "arguments": {"city": PLACE}}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    return message


def spelled(chat: ChatFormat, message: Message) -> str:
    """A message as a model of this format writes it."""
    if message.get("tool_calls") and chat.tool_parser not in ("hermes", "llama_json"):
        return _as_written(chat, message)
    parts: list[str] = []
    if "reasoning_content" in message:
        parts.append(f"<think>\n{message['reasoning_content']}\n</think>\n\n")
    parts.append(message["content"])
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = "parameters" if chat.tool_parser == "llama_json" else "arguments"
        made = {"name": function["name"], arguments: function["arguments"]}
        written = json.dumps(made, ensure_ascii=False)
        is_hermes = chat.tool_parser == "hermes"
        parts.append(f"<tool_call>\n{written}\n</tool_call>" if is_hermes else written)
    return "".join(parts)


def _as_written(chat: ChatFormat, message: Message) -> str:
    """A message as the template writes it, between what opens and what closes the turn."""
    question = {"role": "user", "content": "x"}
    opened = chat.write([question], [TOOL])
    whole = chat.write([question, message], [TOOL], add_generation_prompt=False)
    start = first_difference([*opened], [*whole])
    closing = closing_token(chat)
    end = -1 if closing is None else whole.rfind(chat.tokenizer.convert_ids_to_tokens(closing))
    return whole[start:end] if end > start else whole[start:]


def check_scenario(chat: ChatFormat, scenario: Scenario) -> Finding:
    """Play a conversation call by call, and say what becomes of the history.

    Its tokens are *extended* when the template writes the answers back as they were sampled, *kept*
    when it doesn't and the splice puts the sampled ones in their place, and *rewritten* when there
    is no place for them.
    """
    places = sorted(scenario.answers)
    messages, tools = scenario.messages, scenario.tools
    differs_at = None
    try:
        prompt = chat.render(messages[: places[0]], tools)
        for place, following in zip(places, [*places[1:], len(messages)], strict=True):
            prefix = TruePrefix(prompt, _sampled(chat, prompt, scenario.answers[place]))
            upto = messages[:following]
            prompt = chat.continue_from(prefix, upto, place, tools)
            written = chat.render(upto, tools)
            if differs_at is None and written != prompt:
                differs_at = first_difference(written, prompt)
    except PrefixError as error:
        return _broken(chat, scenario, error)
    except GenerationRequestError as error:
        return refused(scenario.name, error)
    if differs_at is None:
        found = "extended: the template writes every answer back as it was sampled"
        return Finding(check=scenario.name, severity="ok", found=found)
    return Finding(
        check=scenario.name,
        severity="ok",
        found=f"kept: the template would write token {differs_at} differently; sampled "
        "tokens stay in its place",
        position=differs_at,
    )


def _sampled(chat: ChatFormat, prompt: list[int], answer: str) -> list[int]:
    if chat.leaves_reasoning_open(prompt):
        opened = answer.removeprefix("<think>")
        answer = opened if opened != answer else f"\n</think>\n\n{answer}"
    end = closing_token(chat)
    return [*chat.encode(answer), *([] if end is None else [end])]


def _broken(chat: ChatFormat, scenario: Scenario, error: PrefixError) -> Finding:
    shown = ""
    if error.expected is not None and error.received is not None:
        show = chat.tokenizer.decode
        shown = f" ({show(error.expected)!r} becomes {show(error.received)!r})"
    keeps = "reasoning" in scenario.uses
    return Finding(
        check=scenario.name,
        severity="break",
        found=f"rewritten: at token {error.position} the history is not what was sampled{shown}",
        remedy="use a template that leaves history as it is"
        + (
            ", let the agent leave reasoning out of the history and set token_source='ledger',"
            if keeps
            else ""
        )
        + " or set generation.on_rewrite='segment'",
        position=error.position,
    )


def refused(check: str, error: GenerationRequestError) -> Finding:
    """What there is to say where the template refuses a conversation."""
    return Finding(
        check=check,
        severity="break",
        found=str(error),
        remedy="use another template, or tasks without such conversations",
    )


def closing_token(chat: ChatFormat) -> int | None:
    """The token that closes an assistant's turn in the template."""
    question, answer = {"role": "user", "content": "x"}, said("It is cold.")
    whole = chat.render([question, answer], add_generation_prompt=False)
    text = chat.encode("It is cold.")
    start = next(
        (i for i in range(len(whole), -1, -1) if whole[i : i + len(text)] == text),
        len(chat.render([question], add_generation_prompt=False)),
    )
    return next((token_id for token_id in whole[start:] if token_id in chat.end_ids), None)


def first_difference(first: Sequence[object], second: Sequence[object]) -> int:
    """Where two sequences part; the length of the shorter one where they don't."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
