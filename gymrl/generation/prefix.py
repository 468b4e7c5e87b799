r"""The on-policy splice: prompt the next turn with the very tokens that were sampled.

A conversation that is rendered afresh does not give back the tokens the model saw and sampled: text
tokenises differently, templates re-render tool calls and drop reasoning. So the tokens themselves
travel with the assistant message, and the template is used only for what comes *after* it::

    template ids:  <s> user ... assistant  r e - r e n d e r e d  <end>  \\n user ... assistant
                   └───────────── template prefix ─────────────────┘ │
                                                             kept ───┴──────────────────────────
    prompt:        <s> user ... assistant  s a m p l e d  <end>      \\n user ... assistant

Everything up to the end of that assistant turn is replaced by the true prefix, verbatim; the
template's part after the end-of-turn token follows. See ``docs/design/on-policy-tokens.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from gymrl.errors import PrefixError

_WINDOW = 4


class TruePrefix(msgspec.Struct, frozen=True):
    """What an assistant message carries: its call's prompt, and what the call sampled."""

    prompt_token_ids: list[int]
    generation_token_ids: list[int]


def splice(
    prefix: TruePrefix,
    template_ids: Sequence[int],
    template_prefix_ids: Sequence[int],
    end_ids: Collection[int],
    assistant_start: int = 0,
) -> list[int]:
    """The prompt of the next turn.

    Args:
        prefix: The true tokens up to the end of the assistant turn.
        template_ids: The whole conversation as the template renders it.
        template_prefix_ids: The conversation up to and including the assistant message.
        end_ids: Tokens that end a turn. A generation that ended on one keeps it, in place of the
            template's; after any other ending (by length, by a stop text or by a stop token that
            ends no turn) the template's end-of-turn token follows, once.
        assistant_start: Where the assistant's turn begins in `template_prefix_ids`: its
            end-of-turn token is looked for from there on.

    Returns:
        `prefix`, verbatim, and what the template puts after the turn; strictly longer than the
        prefix.

    Raises:
        PrefixError: The template writes no end-of-turn token after the message, renders the
            history differently when the conversation goes on (`position` is the first token that
            differs), or adds nothing after the turn.
    """
    end = _end_of_turn(template_prefix_ids, end_ids, assistant_start)
    _require_same_history(template_ids, template_prefix_ids, end)
    if len(template_ids) == end + 1:
        raise PrefixError(
            "the chat template adds nothing after the assistant message that carries token ids; "
            "send a message after it, or ask for the generation prompt",
            position=end,
        )
    generated = prefix.generation_token_ids
    is_closed = bool(generated) and generated[-1] in end_ids
    tail = template_ids[end + 1 :] if is_closed else template_ids[end:]
    return [*prefix.prompt_token_ids, *generated, *tail]


def _end_of_turn(ids: Sequence[int], end_ids: Collection[int], start: int) -> int:
    for position in range(len(ids) - 1, start - 1, -1):
        if ids[position] in end_ids:
            return position
    raise PrefixError(
        f"the chat template writes none of the end-of-turn tokens {sorted(end_ids)} after the "
        "assistant message, so there is no place to continue from; use a template that closes "
        "assistant turns",
        position=len(ids),
        received=list(ids[-_WINDOW:]),
    )


def _require_same_history(
    template_ids: Sequence[int], template_prefix_ids: Sequence[int], end: int
) -> None:
    if list(template_ids[: end + 1]) == list(template_prefix_ids[: end + 1]):
        return
    position = next(
        (
            i
            for i, (whole, part) in enumerate(zip(template_ids, template_prefix_ids, strict=False))
            if whole != part
        ),
        min(len(template_ids), len(template_prefix_ids)),
    )
    expected = list(template_prefix_ids[position : position + _WINDOW])
    received = list(template_ids[position : position + _WINDOW])
    raise PrefixError(
        "the chat template renders the history differently once the conversation goes on (it may "
        f"drop reasoning of earlier turns): at token {position} it writes {received}, where the "
        f"turn itself had {expected}. Use a template that leaves history as it is, or set "
        "on_rewrite='segment' to start a new segment",
        position=position,
        expected=expected,
        received=received,
    )
