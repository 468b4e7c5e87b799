"""Four faults of an answer that take its reward away.

A penalty is a predicate over one trajectory. When it holds, the total becomes 0 and the ledger says
which penalty spoke; each speaks at most once for a row, however often the fault occurs. A rate is a
count over ledgers. Names of settings and metrics are those of NeMo RL's reward penalties.

What depends on the tokenizer is resolved once for a run (:func:`resolve_penalties`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from gymrl.config import Config, require
from gymrl.scoring.answer import Answer
from gymrl.scoring.stats import GroupStats
from gymrl.types import Trajectory

Predicate = Callable[[Trajectory, Answer], bool]
Encode = Callable[[str], Sequence[int]]

RULES = {
    "duplicated_reasoning": "reasoning_equal_to_final_answer_rate",
    "empty_final_answer": "empty_final_answer_rate",
    "unwanted_token": "unwanted_token_rate",
    "malformed_think_tag": "malformed_think_tag_rate",
}
"""Each penalty's name in the ledger, and the name of its rate."""

DEFAULT_THINKING_TAGS = ("<think>", "</think>")


class PenaltyTokenIds(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids that penalties look for.

    Attributes:
        unwanted: Ids that no generation may hold.
        think_open: The opening thinking tag; None: from the tokenizer, when one token spells it.
        think_close: The closing one, likewise.
    """

    unwanted: tuple[int, ...] = ()
    think_open: int | None = None
    think_close: int | None = None

    def __post_init__(self) -> None:
        given = (*self.unwanted, self.think_open, self.think_close)
        require(
            all(number is None or number >= 0 for number in given),
            "token_ids",
            given,
            "token ids are 0 or more",
        )


class PenaltyConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which penalties apply. All are off by default.

    Attributes:
        penalize_duplicated_reasoning: The answer repeats the reasoning before it, word for word.
        penalize_empty_final_answer: There is no final message, or no text in it.
        penalize_unwanted_tokens: A generation holds one of ``token_ids.unwanted``, which is
            required then.
        penalize_malformed_think_tag: A thinking tag is where none may be.
        token_ids: Ids that the last two look for.
        thinking_tags: The opening and the closing tag.
    """

    penalize_duplicated_reasoning: bool = False
    penalize_empty_final_answer: bool = False
    penalize_unwanted_tokens: bool = False
    penalize_malformed_think_tag: bool = False
    token_ids: PenaltyTokenIds = PenaltyTokenIds()
    thinking_tags: tuple[str, str] = DEFAULT_THINKING_TAGS

    def __post_init__(self) -> None:
        require(
            not self.penalize_unwanted_tokens or bool(self.token_ids.unwanted),
            "token_ids.unwanted",
            self.token_ids.unwanted,
            "name the unwanted token ids, or switch penalize_unwanted_tokens off",
        )
        opening, closing = self.thinking_tags
        require(
            bool(opening) and bool(closing) and opening != closing,
            "thinking_tags",
            self.thinking_tags,
            "give two different tags, the opening one first",
        )


class Penalty(msgspec.Struct, frozen=True):
    """One penalty that is on, ready to apply.

    Attributes:
        rule: Its name in the ledger.
        metric: Its rate's name.
        applies: Whether a trajectory has the fault.
    """

    rule: str
    metric: str
    applies: Predicate


def resolve_penalties(
    config: PenaltyConfig | None, encode: Encode | None = None
) -> tuple[Penalty, ...]:
    """The penalties that are on, in the order they apply, with their token ids resolved.

    Args:
        config: None: no penalties.
        encode: Text to token ids, without special tokens added. A thinking tag's id is taken from
            it only when the tag is exactly one token; without both ids the check on token ids is
            left out and the others stand.
    """
    if config is None:
        return ()
    found: list[tuple[str, Predicate]] = []
    if config.penalize_duplicated_reasoning:
        found.append(("duplicated_reasoning", repeats_reasoning))
    if config.penalize_empty_final_answer:
        found.append(("empty_final_answer", has_empty_answer))
    if config.penalize_unwanted_tokens:
        found.append(("unwanted_token", unwanted_tokens(config.token_ids.unwanted)))
    if config.penalize_malformed_think_tag:
        ids = think_tag_ids(config, encode)
        found.append(("malformed_think_tag", malformed_thinking(ids, config.thinking_tags)))
    return tuple(Penalty(rule, RULES[rule], applies) for rule, applies in found)


def think_tag_ids(config: PenaltyConfig, encode: Encode | None) -> tuple[int, int] | None:
    """The ids of the opening and the closing tag; None unless each is known to be one token."""
    opening = config.token_ids.think_open
    closing = config.token_ids.think_close
    if opening is None:
        opening = _single_token(config.thinking_tags[0], encode)
    if closing is None:
        closing = _single_token(config.thinking_tags[1], encode)
    if opening is None or closing is None:
        return None
    return opening, closing


def _single_token(text: str, encode: Encode | None) -> int | None:
    if encode is None:
        return None
    ids = list(encode(text))
    return int(ids[0]) if len(ids) == 1 else None


def repeats_reasoning(trajectory: Trajectory, answer: Answer) -> bool:
    """A reasoning item's text equals that of the item after it, blanks at the ends aside.

    Empty texts repeat nothing.
    """
    items = answer.items
    for item, following in itertools.pairwise(items):
        text = item.text.strip()
        if item.kind == "reasoning" and text and text == following.text.strip():
            return True
    return False


def has_empty_answer(trajectory: Trajectory, answer: Answer) -> bool:
    """There is no final message of the model, or it has no text.

    Content that is null, an empty string, blanks or an empty list is no text. An answer that ends
    with a function call is not empty: the agent's loop was cut off in the middle.
    """
    items = answer.items
    if items and items[-1].kind == "function_call":
        return False
    for item in reversed(items):
        if item.is_model_message:
            return not item.text.strip()
    return True


def unwanted_tokens(ids: Sequence[int]) -> Predicate:
    """A predicate: some sampled token, the last of a turn included, is one of `ids`."""
    unwanted = np.array(sorted(set(ids)), dtype=np.int64)

    def has_unwanted_token(trajectory: Trajectory, answer: Answer) -> bool:
        return any(
            bool(np.isin(trajectory.token_ids[turn.generation_start : turn.end], unwanted).any())
            for turn in trajectory.turns
        )

    return has_unwanted_token


def malformed_thinking(ids: tuple[int, int] | None, tags: tuple[str, str]) -> Predicate:
    """A predicate: a thinking tag is where none may be, by any of three checks.

    1. A turn's `has_malformed_thinking` flag.
    2. Token ids, when `ids` is given (:func:`breaks_think_protocol`).
    3. Texts, since a model can spell a tag with ordinary tokens: the decoded generation of a turn,
       or of an output item, holds an opening tag, or more than one closing tag. The opening tag
       belongs to the prompt.

    Args:
        ids: Token ids of the opening and the closing tag.
        tags: Their texts.
    """
    opening, closing = tags

    def is_malformed_text(text: str | None) -> bool:
        return text is not None and (opening in text or text.count(closing) > 1)

    def has_malformed_thinking(trajectory: Trajectory, answer: Answer) -> bool:
        if any(turn.has_malformed_thinking for turn in trajectory.turns):
            return True
        if ids is not None and breaks_think_protocol(trajectory, ids):
            return True
        return any(is_malformed_text(turn.generation_text) for turn in trajectory.turns) or any(
            is_malformed_text(item.generation_text) for item in answer.items
        )

    return has_malformed_thinking


def breaks_think_protocol(trajectory: Trajectory, ids: tuple[int, int]) -> bool:
    """Whether a turn's counts of tag tokens fit neither thinking nor not thinking.

    Counted in what the prompt added for the turn: as many opening as closing tags means that
    thinking is off, and the generation must hold neither; one opening tag more means that it is on,
    and the generation must hold no opening and one closing tag. Any other prompt is a fault too.
    Turns without a generation are passed over.
    """
    opening, closing = ids
    for turn in trajectory.turns:
        if turn.end == turn.generation_start:
            continue
        prompt = trajectory.token_ids[turn.start : turn.generation_start]
        generation = trajectory.token_ids[turn.generation_start : turn.end]
        still_open = np.count_nonzero(prompt == opening) - np.count_nonzero(prompt == closing)
        if still_open not in (0, 1):
            return True
        if np.count_nonzero(generation == opening) != 0:
            return True
        if np.count_nonzero(generation == closing) != still_open:
            return True
    return False


def apply_penalties(
    trajectory: Trajectory, answer: Answer, penalties: Sequence[Penalty]
) -> Trajectory:
    """A trajectory with one ledger entry of value 0 for each penalty that applies."""
    reward = trajectory.reward
    for penalty in penalties:
        if penalty.applies(trajectory, answer):
            reward = reward.adjusted(penalty.rule, 0.0)
    if reward is trajectory.reward:
        return trajectory
    return msgspec.structs.replace(trajectory, reward=reward)


def penalty_stats(trajectories: Sequence[Trajectory], penalties: Sequence[Penalty]) -> GroupStats:
    """The rate of each penalty that is on, 0 included, read off the ledgers."""
    if not trajectories:
        return GroupStats()
    spoken = [{entry.rule for entry in t.reward.adjustments} for t in trajectories]
    return GroupStats(
        means={
            penalty.metric: tuple(float(penalty.rule in rules) for rules in spoken)
            for penalty in penalties
        }
    )
