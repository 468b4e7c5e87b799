"""Will rollouts hold together with this chat template? Asked of the template, before a run.

Only the tokenizer is needed: prompts are rendered the way the server does it. What becomes of whole
conversations is tried in :mod:`gymrl.generation.template_scenarios`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from gymrl.errors import GenerationRequestError
from gymrl.generation.chat import PLAIN_TEXT
from gymrl.generation.findings import Finding, Severity
from gymrl.generation.template_scenarios import (
    ALL_USES,
    PLACE,
    TEMPERATURE,
    TOOL,
    Use,
    check_scenario,
    closing_token,
    first_difference,
    refused,
    said,
    scenarios,
    spelled,
)

if TYPE_CHECKING:
    from gymrl.generation.chat import ChatFormat
    from gymrl.generation.template_messages import Message

__all__ = ["ALL_USES", "Use", "check_template", "no_template"]

_FOREIGN_TEXT = "\u00fcber \u65e5\u672c \u2014 \U0001f917"


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
        return [refused("chat template", error)]
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


def _text(chat: ChatFormat) -> Iterator[Finding]:
    check = "text"
    tries: list[tuple[str, Severity]] = [(PLAIN_TEXT, "break"), (_FOREIGN_TEXT, "warn")]
    for text, severity in tries:
        read = chat.read_back(text)
        if not chat.knows(text):
            yield Finding(
                check=check,
                severity="warn",
                found=f"{text!r} is {read!r} to the model: its vocabulary has not all of it",
                remedy="use tasks whose words it knows",
            )
            return
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


def _end_of_turn(chat: ChatFormat, stop_ids: Collection[int] | None) -> Iterator[Finding]:
    check = "end of turn"
    closing = closing_token(chat)
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
            f"{first_difference(opened, closed)}",
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
    answer = {"role": "tool", "content": TEMPERATURE, "tool_call_id": "call_1"}
    call = said("", calls=True)
    try:
        shown = chat.write([user, call, answer], [TOOL])
    except GenerationRequestError:
        return  # as the scenarios will say
    missing = [
        name
        for name, text in (("its arguments", PLACE), ("the tool's answer", TEMPERATURE))
        if text not in shown and json.dumps(text)[1:-1] not in shown
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
    parsed = chat.parse(spelled(chat, call), [TOOL])
    if len(parsed.tool_calls) == 1:
        kind = "rendered" if chat.template_has_tools else "told as text"
        found = f"{kind}; calls are read as {chat.tool_parser}"
        yield Finding(check=check, severity="ok", found=found)
    else:
        yield Finding(
            check=check,
            severity="break",
            found=f"the parser {chat.tool_parser} does not read a call as the template writes it: "
            f"{spelled(chat, call)!r}",
            remedy="set generation.tool_parser to the parser of this model",
        )


def _parallel_calls(chat: ChatFormat, messages: list[Message]) -> Iterator[Finding]:
    user, call, answer = messages
    both = {**call, "tool_calls": call["tool_calls"] * 2}
    try:
        chat.render([user, both, answer, answer], [TOOL])
    except GenerationRequestError:
        yield Finding(
            check="tools",
            severity="warn",
            found="the template refuses two calls in one turn: the next call of such a rollout "
            "would fail",
            remedy="set parallel_tool_calls to false in the rows",
        )
