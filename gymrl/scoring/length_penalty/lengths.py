"""How long a rollout is: its reasoning, its answer, both together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.scoring.answer import Answer
    from gymrl.scoring.length_penalty.config import Channel


class Lengths(msgspec.Struct, frozen=True):
    """Lengths of one rollout, in tokens or characters."""

    reasoning: int
    answer: int

    @property
    def total(self) -> int:
        """Reasoning and answer together."""
        return self.reasoning + self.answer

    def of(self, channel: Channel) -> int:
        """The length of a channel."""
        length: int = getattr(self, channel)
        return length


def output_lengths(answer: Answer, count: Callable[[str], int]) -> Lengths:
    """The lengths of the model's own output.

    Counted are the texts of ``reasoning`` items, and of ``message`` items whose role is
    ``assistant`` or absent. Tool calls and their outputs, and messages that an agent appended as
    the user's, are not. Items are counted one by one and summed. Tokens are counted on these texts
    and not on the sampled ids, which also hold tool calls, tags and end-of-turn marks.

    Args:
        answer: The view over the rollout's result.
        count: The length of one text.
    """
    reasoning = answered = 0
    for item in answer.items:
        if not item.text:
            continue
        if item.kind == "reasoning":
            reasoning += count(item.text)
        elif item.is_model_message:
            answered += count(item.text)
    return Lengths(reasoning, answered)
