"""Which samples the loss leaves out, and which were cut off by a token limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gymrl.scoring.answer import Answer
    from gymrl.types import Trajectory

LENGTH_REASONS = frozenset(
    {
        "max_output_tokens",
        "length",
        "max_tokens",
        "max_model_len",
        "context_length_exceeded",
    }
)
"""Values of ``incomplete_details.reason`` that mean a token limit ended the response."""


def is_flagged(answer: Answer) -> bool:
    """Whether the environment asks to leave the sample out of the loss.

    Either ``mask_sample`` or ``instance_config.mask_sample`` being true says so: a server writes
    ``mask_sample: false`` into every answer, also where an environment set only the nested flag.
    null, a missing field and anything but a boolean mean no.
    """
    if answer.value("mask_sample") is True:
        return True
    nested = answer.value("instance_config")
    return isinstance(nested, dict) and nested.get("mask_sample") is True


def masked(trajectory: Trajectory, answer: Answer, honor_flags: bool = True) -> bool:
    """The `mask_sample` of a scored trajectory.

    Args:
        trajectory: As it came.
        answer: The view over its result.
        honor_flags: False sets environment flags aside (they may be too coarse: some agents
            flag every rollout that used all its steps, also solved ones). A placeholder, which
            has nothing to train on, keeps its own flag either way.
    """
    if trajectory.placeholder and trajectory.mask_sample:
        return True
    return honor_flags and (trajectory.mask_sample or is_flagged(answer))


def is_length_reason(reason: object) -> bool:
    """Whether an ``incomplete_details.reason`` says that a token limit ended the response."""
    return isinstance(reason, str) and reason in LENGTH_REASONS


def hit_max_tokens(
    trajectory: Trajectory, max_total_tokens: int | None, answer: Answer | None = None
) -> bool:
    """Whether a token limit cut the rollout off.

    Reaching the limit exactly is rare in several turns: when the next prompt no longer fits, the
    model server gives an empty completion and the tokens stop short. So the final response's
    reason counts as well, also when it was the per-call cap that ended it. Another reason
    (``content_filter``), no reason and malformed metadata are not truncation.

    Args:
        trajectory: Its tokens are counted, prompts included.
        max_total_tokens: The generator's context in tokens; None: only reasons count.
        answer: The view over its result, when the reason is to be read there as well.
    """
    if max_total_tokens is not None and trajectory.num_tokens >= max_total_tokens:
        return True
    if is_length_reason(trajectory.incomplete_reason):
        return True
    return answer is not None and is_length_reason(answer.incomplete_reason)
