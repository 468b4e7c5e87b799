"""Recognise an answer that comes back without its tokens, by what it was an answer to.

The rule: an assistant's message of a request is the answer of an earlier call of the same rollout
when

- everything before it equals the messages of that call: roles, texts, tool answers, and of earlier
  assistant messages text and calls;
- tools and template variables are those of that call;
- its text equals the answer's, white space at either end aside, and so do its calls: names, and
  arguments as JSON values.

Ids of calls don't count, as agents make their own. Reasoning doesn't count either: agents leave it
out of the history, and the tokens of the answer still hold it. Of several calls with equal answers to
equal messages the latest counts; each is a sample of the policy, and which one the prompt continues
is what the ledger says.

A key is a digest of all that. The key of a history grows message by message, so looking at every
place of a conversation costs one pass over it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import PrefixError
from gymrl.generation.prefix import TruePrefix
from gymrl.generation.template_messages import arguments_mapping

if TYPE_CHECKING:
    from gymrl.generation.ledger import RolloutLedger
    from gymrl.generation.parsing import ParsedText, ToolCall
    from gymrl.generation.policy import Conversation

_encode = msgspec.json.Encoder(order="deterministic").encode
_KEY_BYTES = 16


def answer_keys(conversation: Conversation, parsed: ParsedText) -> list[bytes]:
    """The keys by which an answer will be recognised.

    There are two when several calls were read: a request may ask for one call at a time, and then
    gets the first.

    Args:
        conversation: What was answered.
        parsed: The answer.
    """
    history = conversation.history or history_of(conversation)
    calls = [parsed.tool_calls, parsed.tool_calls[:1]][: 1 + (len(parsed.tool_calls) > 1)]
    return [_extended(history, _answer(parsed.content, _made(made))) for made in calls]


def history_of(conversation: Conversation) -> bytes:
    """The key of all messages of a conversation."""
    *_, key = [_opening(conversation), *(key for _, key in _keys(conversation))]
    return key


class Found(msgspec.Struct, frozen=True):
    """What a rollout's ledger knows of a conversation.

    Attributes:
        prefixes: As the conversation should have them.
        is_unmatched: It has answers of an assistant, and none of them is known.
        history: The key of all its messages.
    """

    prefixes: dict[int, TruePrefix]
    is_unmatched: bool
    history: bytes


def find_prefix(conversation: Conversation, ledger: RolloutLedger) -> Found:
    """The tokens that the conversation continues, by place, and whether its history is unknown.

    Tokens that a message carries count as they are. The ledger speaks for messages that carry none.

    Args:
        conversation: Of the request.
        ledger: Of its rollout.

    Raises:
        PrefixError: A message carries tokens, is an answer of this rollout, and the two disagree.
    """
    carried = dict(conversation.prefixes)
    newest = max(carried, default=-1)
    has_assistant = False
    key = _opening(conversation)
    found: tuple[int, bytes] | None = None
    for place, key in _keys(conversation):
        if conversation.messages[place]["role"] == "assistant":
            has_assistant = True
            if place >= newest and ledger.knows(key):
                found = place, key
    if found is None:
        return Found(carried, has_assistant and not carried, key)
    place, answer_key = found
    known = ledger.answered(answer_key)
    if place not in carried:
        return Found({**carried, place: known}, False, key)
    if carried[place] != known and not ledger.served(carried[place]):
        raise _disagree(place, carried[place], known)
    return Found(carried, False, key)


def _disagree(place: int, carried: TruePrefix, known: TruePrefix) -> PrefixError:
    ours = [*known.prompt_token_ids, *known.generation_token_ids]
    theirs = [*carried.prompt_token_ids, *carried.generation_token_ids]
    position = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    expected, received = ours[position : position + 4], theirs[position : position + 4]
    return PrefixError(
        f"message {place} carries token ids that this server did not give in this rollout: at "
        f"position {position} it has {received}, where the server gave {expected}. Send the "
        "fields back as they came, or leave them out",
        position=position,
        expected=expected,
        received=received,
    )


def _keys(conversation: Conversation) -> Iterator[tuple[int, bytes]]:
    """The key of the conversation up to each message, that one included."""
    key = _opening(conversation)
    for place, message in enumerate(conversation.messages):
        key = _extended(key, _canonical(message))
        yield place, key


def _opening(conversation: Conversation) -> bytes:
    shown = [conversation.tools, conversation.template_kwargs or {}]
    return _extended(b"", shown)


def _extended(key: bytes, value: Any) -> bytes:
    return hashlib.blake2b(key + _encode(value), digest_size=_KEY_BYTES).digest()


def _canonical(message: dict[str, Any]) -> Any:
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return [message["role"], content, message.get("name") or ""]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _answer(content, [(call["name"], call.get("arguments")) for call in calls])


def _answer(content: str, calls: list[tuple[str, Any]]) -> Any:
    read = [[name, arguments_mapping(arguments)] for name, arguments in calls]
    return ["assistant", content.strip(), read]


def _made(calls: tuple[ToolCall, ...]) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in calls]
