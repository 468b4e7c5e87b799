"""What is looked at in a model's answer, before it becomes a turn of a native episode."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gymrl.errors import BadLogprobsError, GenerationError
from gymrl.generation.parsing import (
    CALL_CLOSE,
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    parse_hermes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.generation.base import Generated

_NO_TOKEN = 2**31
"""Token ids are int32."""


def has_broken_tool_call(text: str) -> bool:
    """Whether a tool-call tag is left over when every well-formed call is taken out."""
    if CALL_OPEN not in text and CALL_CLOSE not in text:
        return False
    visible, _ = parse_hermes(text)
    return CALL_OPEN in visible or CALL_CLOSE in visible


def has_malformed_thinking(text: str) -> bool:
    """Whether thinking tags are not one pair at most, opened before it is closed.

    A closing tag alone is well-formed: the prompt may have opened the reasoning.
    """
    opens, closes = text.count(THINK_OPEN), text.count(THINK_CLOSE)
    if opens > 1 or closes > 1:
        return True
    return bool(opens and closes) and text.index(THINK_CLOSE) < text.index(THINK_OPEN)


def check_generated(generated: Generated, room: int, turn: int) -> None:
    """Refuse an answer that can't be trained on.

    Args:
        generated: The answer.
        room: Tokens that were left for it.
        turn: Its number, for the error.

    Raises:
        GenerationError: It has more tokens than were left, or one that no vocabulary has.
        BadLogprobsError: Log-probabilities are too few, missing or not finite.
    """
    token_ids, logprobs = generated.token_ids, generated.logprobs
    if len(token_ids) > room:
        raise GenerationError(
            f"turn {turn}: the generator sampled {len(token_ids)} tokens where {room} were left"
        )
    strange = next((i for i, t in enumerate(token_ids) if not 0 <= t < _NO_TOKEN), None)
    if strange is not None:
        raise GenerationError(
            f"turn {turn}: the generator sampled token {token_ids[strange]} at position {strange}, "
            "which no vocabulary has"
        )
    if logprobs is None or len(logprobs) != len(token_ids):
        count = 0 if logprobs is None else len(logprobs)
        raise BadLogprobsError(
            f"turn {turn}: {count} log-probabilities for {len(token_ids)} sampled tokens",
            turn=turn,
            position=min(count, len(token_ids)),
        )
    position = _first_bad(logprobs)
    if position is not None:
        raise BadLogprobsError(
            f"turn {turn}: the log-probability at position {position} is "
            f"{logprobs[position]!r}; a finite number is needed",
            turn=turn,
            position=position,
        )


def _first_bad(logprobs: Sequence[float | None]) -> int | None:
    for position, value in enumerate(logprobs):
        if value is None or not math.isfinite(value):
            return position
    return None
