"""Will rollouts hold together with this chat template? Asked of the template, before a run.

Conversations of the kinds that agents have are rendered the way the server does it: the prompt of a
first call, an answer the way the model would spell it, the prompt of the next call, and so on. What
the template does to the history shows at once, without a model: only the tokenizer is needed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gymrl.errors import GenerationRequestError, PrefixError
from gymrl.generation.chat import PLAIN_TEXT
from gymrl.generation.prefix import TruePrefix

if TYPE_CHECKING:
    from gymrl.generation.chat import ChatFormat
    from gymrl.generation.template_messages import Message

Severity = Literal["ok", "note", "warn", "break"]
Use = Literal["turns", "tools", "reasoning"]
ALL_USES: frozenset[Use] = frozenset({"turns", "tools", "reasoning"})

_FOREIGN_TEXT = "\u00fcber \u65e5\u672c \u2014 \U0001f917"
_PLACE = "Zürich"
_TEMPERATURE = "minus 7"
_TOOL: dict[str, Any] = {
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


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found.

    Attributes:
        check: What was looked at.
        severity: ``break``: a run that does this fails. ``warn``: it runs, and not as one may
            think. ``note``: worth knowing.
        found: What is the case.
        remedy: What to change; empty where nothing need be.
        position: Token of the first difference, where there is one.
    """

    check: str
    severity: Severity
    found: str
    remedy: str = ""
    position: int | None = None


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


def check_template(
    chat: ChatFormat,
    *,
    stop_ids: Collection[int] | None = None,
    uses: Collection[Use] = ALL_USES,
) -> list[Finding]:
    """Everything there is to say about a template.

    Args:
        chat: The tokenizer with its template, and parsers as the run will have them.
        stop_ids: Tokens on which the engine ends a generation; None: not known, not checked.
        uses: What the run does: several user turns, tools, reasoning.

    Returns:
        Findings in the order of the checks; the run would break if one of them says so.
    """
    question = [{"role": "user", "content": "x"}]
    try:
        chat.write(question)
    except GenerationRequestError as error:
        return [_refused("chat template", error)]
    findings = [*_text(chat), *_end_of_turn(chat, stop_ids), *_generation_prompt(chat), *_bos(chat)]
    if "tools" in uses:
        findings += _tools(chat)
    for scenario in scenarios(chat):
        if scenario.uses <= set(uses):
            findings.append(check_scenario(chat, scenario))
    return findings


def no_template() -> Finding:
    """What there is to say about a tokenizer that has none."""
    return Finding(
        check="chat template",
        severity="break",
        found="there is none",
        remedy="add chat_template.jinja to the model's directory, or use an instruct model",
    )


def _refused(check: str, error: GenerationRequestError) -> Finding:
    return Finding(
        check=check,
        severity="break",
        found=str(error),
        remedy="use another template, or tasks without such conversations",
    )


def would_break(findings: Collection[Finding]) -> bool:
    """Whether a run would fail."""
    return any(finding.severity == "break" for finding in findings)


def scenarios(chat: ChatFormat) -> Iterator[Scenario]:
    """Conversations of every kind that the format has."""
    user = {"role": "user", "content": "How cold is it?"}
    more = {"role": "user", "content": "And tomorrow?"}
    yield Scenario(
        name="several user turns",
        messages=[user, _said("It is cold."), more, _said("Colder."), user],
        answers={1: "It is cold.", 3: "Colder."},
        uses=frozenset({"turns"}),
    )
    if chat.tool_parser != "none":
        yield from _tool_scenarios(chat, user, more)
    if chat.reasoning_parser != "none":
        thought = _said("Cold.", reasoning="It is winter.")
        text = _spelled(chat, thought)
        yield Scenario(
            name="reasoning, then another user turn",
            messages=[user, thought, more, thought, user],
            answers={1: text, 3: text},
            uses=frozenset({"turns", "reasoning"}),
        )


def _tool_scenarios(chat: ChatFormat, user: Message, more: Message) -> Iterator[Scenario]:
    answer = {"role": "tool", "content": _TEMPERATURE, "tool_call_id": "call_1"}
    calls = [_said("", calls=True)]
    if chat.reasoning_parser != "none":
        calls.append(_said("", reasoning="I should look.", calls=True))
    for call in calls:
        uses: frozenset[Use] = frozenset({"tools"})
        name = "a loop of tool calls"
        if "reasoning_content" in call:
            uses, name = uses | {"reasoning"}, "reasoning in a loop of tool calls"
        text = _spelled(chat, call)
        yield Scenario(
            name=name,
            messages=[user, call, answer, call, answer],
            answers={1: text, 3: text},
            tools=[_TOOL],
            uses=uses,
        )
        yield Scenario(
            name=f"{name}, then another user turn",
            messages=[user, call, answer, _said("Cold."), more, call, answer],
            answers={1: text, 3: "Cold.", 5: text},
            tools=[_TOOL],
            uses=uses | {"turns"},
        )


def _said(content: str, *, reasoning: str | None = None, calls: bool = False) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        function = {"name": "get_weather", "arguments": {"city": _PLACE}}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    return message


def _spelled(chat: ChatFormat, message: Message) -> str:
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
    opened = chat.write([question], [_TOOL])
    whole = chat.write([question, message], [_TOOL], add_generation_prompt=False)
    start = _first_difference([*opened], [*whole])
    closing = _closing(chat)
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
    first_difference = None
    try:
        prompt = chat.render(messages[: places[0]], tools)
        for place, following in zip(places, [*places[1:], len(messages)], strict=True):
            prefix = TruePrefix(prompt, _sampled(chat, prompt, scenario.answers[place]))
            upto = messages[:following]
            prompt = chat.continue_from(prefix, upto, place, tools)
            written = chat.render(upto, tools)
            if first_difference is None and written != prompt:
                first_difference = _first_difference(written, prompt)
    except PrefixError as error:
        return _broken(chat, scenario, error)
    except GenerationRequestError as error:
        return _refused(scenario.name, error)
    if first_difference is None:
        found = "extended: the template writes every answer back as it was sampled"
        return Finding(check=scenario.name, severity="ok", found=found)
    return Finding(
        check=scenario.name,
        severity="ok",
        found=f"kept: the template would write token {first_difference} differently; sampled "
        "tokens stay in its place",
        position=first_difference,
    )


def _sampled(chat: ChatFormat, prompt: list[int], answer: str) -> list[int]:
    if chat.leaves_reasoning_open(prompt):
        opened = answer.removeprefix("<think>")
        answer = opened if opened != answer else f"\n</think>\n\n{answer}"
    end = _closing(chat)
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


def _text(chat: ChatFormat) -> Iterator[Finding]:
    check = "text"
    tries: list[tuple[str, Severity]] = [(PLAIN_TEXT, "break"), (_FOREIGN_TEXT, "warn")]
    for text, severity in tries:
        read = chat.read_back(text)
        if read != text:
            kind = type(chat.tokenizer).__name__
            yield Finding(
                check=check,
                severity=severity,
                found=f"{text!r} is {read!r} to the model: {kind} does not give texts back",
                remedy="look whether tokenizer_class in tokenizer_config.json fits tokenizer.json; "
                "PreTrainedTokenizerFast takes that file as it is",
            )
            return
    yield Finding(check=check, severity="ok", found="the tokenizer gives texts back")


def _closing(chat: ChatFormat) -> int | None:
    """The token that closes an assistant's turn in the template."""
    question, answer = {"role": "user", "content": "x"}, _said("It is cold.")
    whole = chat.render([question, answer], add_generation_prompt=False)
    text = chat.encode("It is cold.")
    start = next(
        (i for i in range(len(whole), -1, -1) if whole[i : i + len(text)] == text),
        len(chat.render([question], add_generation_prompt=False)),
    )
    return next((token_id for token_id in whole[start:] if token_id in chat.end_ids), None)


def _end_of_turn(chat: ChatFormat, stop_ids: Collection[int] | None) -> Iterator[Finding]:
    check = "end of turn"
    closing = _closing(chat)
    if closing is None:
        yield Finding(
            check=check,
            severity="break",
            found="the template closes an assistant's turn with no end-of-turn token",
            remedy="add the tokenizer's eos_token after assistant messages in the template",
        )
        return
    token = chat.tokenizer.convert_ids_to_tokens(closing)
    if stop_ids is not None and closing not in stop_ids:
        yield Finding(
            check=check,
            severity="break",
            found=f"the template closes turns with {token!r} ({closing}), and the engine stops on "
            f"{sorted(stop_ids)} only: every answer would run to its token limit",
            remedy=f"add {closing} to eos_token_id in generation_config.json",
        )
    else:
        yield Finding(check=check, severity="ok", found=f"{token!r} ({closing})")


def _generation_prompt(chat: ChatFormat) -> Iterator[Finding]:
    check = "generation prompt"
    question = [{"role": "user", "content": "x"}]
    closed = chat.render(question, add_generation_prompt=False)
    opened = chat.render(question)
    if opened == closed:
        yield Finding(
            check=check,
            severity="note",
            found="the template adds none: what a user says is followed by the answer at once",
        )
    elif opened[: len(closed)] != closed:
        yield Finding(
            check=check,
            severity="warn",
            found="asking for the assistant's turn changes what comes before it, at token "
            f"{_first_difference(opened, closed)}",
            remedy="let the template only add to the end under add_generation_prompt",
        )
    else:
        text = chat.tokenizer.decode(opened[len(closed) :])
        yield Finding(check=check, severity="ok", found=repr(text))


def _bos(chat: ChatFormat) -> Iterator[Finding]:
    check = "beginning of text"
    bos = chat.tokenizer.bos_token_id
    rendered = chat.render([{"role": "user", "content": "x"}])
    count = 0 if bos is None else next((i for i, t in enumerate(rendered) if t != bos), 0)
    adds_bos = bos is not None and list(chat.tokenizer("x")["input_ids"])[:1] == [bos]
    if count > 1:
        yield Finding(
            check=check,
            severity="break",
            found=f"the template writes the beginning-of-text token {count} times",
            remedy="write bos_token once in the template",
        )
    elif count and adds_bos:
        yield Finding(
            check=check,
            severity="note",
            found="the template writes the token, and so does the tokenizer: gymrl has it once; "
            "code that tokenises the rendered text has it twice",
            remedy="tokenise rendered text with add_special_tokens=False",
        )
    elif adds_bos:
        yield Finding(
            check=check,
            severity="warn",
            found="the tokenizer begins texts with a token that the template does not write, so "
            "prompts are without it",
            remedy="begin the template with {{ bos_token }} if the model was trained so",
        )
    else:
        yield Finding(check=check, severity="ok", found="once" if count else "none")


def _tools(chat: ChatFormat) -> Iterator[Finding]:
    check = "tools"
    if not chat.template_has_tools:
        yield Finding(
            check=check,
            severity="warn",
            found="the template knows no tools; they are described in the system message, and "
            "calls are written as text, in hermes form",
            remedy="use a model that was trained on tools, where tasks need them",
        )
    if chat.tool_parser == "none":
        yield Finding(
            check=check,
            severity="break",
            found="no parser fits the template: a call that the model makes would not be read",
            remedy="set generation.tool_parser (hermes, llama_json, or with vLLM installed a name "
            "of its registry), or use tasks without tools",
        )
        return
    user = {"role": "user", "content": "x"}
    answer = {"role": "tool", "content": _TEMPERATURE, "tool_call_id": "call_1"}
    call = _said("", calls=True)
    try:
        spelled = chat.write([user, call, answer], [_TOOL])
    except GenerationRequestError:
        return  # as the scenarios will say
    missing = [
        name
        for name, text in (("its arguments", _PLACE), ("the tool's answer", _TEMPERATURE))
        if text not in spelled and json.dumps(text)[1:-1] not in spelled
    ]
    if missing:
        yield Finding(
            check=check,
            severity="break",
            found=f"after a call the template leaves out {' and '.join(missing)}",
            remedy="use a template that renders tool calls and role 'tool'",
        )
        return
    yield from _parallel_calls(chat, [user, call, answer])
    parsed = chat.parse(_spelled(chat, call), [_TOOL])
    if len(parsed.tool_calls) == 1:
        kind = "rendered" if chat.template_has_tools else "told as text"
        found = f"{kind}; calls are read as {chat.tool_parser}"
        yield Finding(check=check, severity="ok", found=found)
    else:
        yield Finding(
            check=check,
            severity="break",
            found=f"the parser {chat.tool_parser} does not read a call as the template writes it: "
            f"{_spelled(chat, call)!r}",
            remedy="set generation.tool_parser to the parser of this model",
        )


def _parallel_calls(chat: ChatFormat, messages: list[Message]) -> Iterator[Finding]:
    user, call, answer = messages
    both = {**call, "tool_calls": call["tool_calls"] * 2}
    try:
        chat.render([user, both, answer, answer], [_TOOL])
    except GenerationRequestError:
        yield Finding(
            check="tools",
            severity="warn",
            found="the template refuses two calls in one turn: the next call of such a rollout "
            "would fail",
            remedy="set parallel_tool_calls to false in the rows",
        )


def _first_difference(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
