"""Rewards under NeMo RL's names: penalties, components, truncation, each over :mod:`gymrl.scoring`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from gymrl.compat.nemo_rl.settings import plain, plain_mapping
from gymrl.numbers import reward_number
from gymrl.scoring import PenaltyConfig, check_reward_contract, reward_components
from gymrl.scoring.answer import Answer
from gymrl.scoring.components import columns_of
from gymrl.scoring.masks import is_length_reason
from gymrl.scoring.penalties import RULES, apply_penalties, resolve_penalties, think_tag_ids
from gymrl.types import Reward, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def encode_with(tokenizer: Any) -> Callable[[str], list[int]] | None:
    """Text to token ids without special tokens added; None without a tokenizer."""
    if tokenizer is None:
        return None
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one inside

    def encode(text: str) -> list[int]:
        return list(inner.encode(text, add_special_tokens=False))

    return encode


def penalty_config(
    reward_penalty_config: Any, thinking_tags: Sequence[str] | None = None
) -> PenaltyConfig | None:
    """A penalty block, whatever it came as.

    Args:
        reward_penalty_config: A mapping, a pydantic model, or None for no penalties. Null values
            count as absent.
        thinking_tags: Where the block names none.

    Raises:
        ConfigError: The block is wrong.
    """
    if reward_penalty_config is None or isinstance(reward_penalty_config, PenaltyConfig):
        return reward_penalty_config
    values = _without_nulls(plain_mapping(reward_penalty_config, "reward_penalty_config"))
    if thinking_tags is not None:
        values.setdefault("thinking_tags", list(thinking_tags))
    return PenaltyConfig.from_dict(values)


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None
    }


def resolve_reward_penalty_config(
    reward_penalty_config: Any,
    tokenizer: Any,
    thinking_tags: list[str] | tuple[str, ...] | None = None,
) -> dict[str, Any] | None:
    """A penalty block with the ids of the thinking tags filled in.

    They are taken from the tokenizer only where each tag is exactly one token; without both, the
    check on token ids is left out. Unwanted ids are never guessed.

    Args:
        reward_penalty_config: The block; None: no penalties, and None comes back.
        tokenizer: Has ``encode(text, add_special_tokens=False)``; None: nothing is filled in.
        thinking_tags: The opening and the closing tag.

    Raises:
        ConfigError: Unwanted tokens are penalised and none is named, or the block is wrong.
    """
    config = penalty_config(reward_penalty_config, thinking_tags)
    if config is None:
        return None
    resolved: dict[str, Any] = plain(config.to_dict())
    ids = think_tag_ids(config, encode_with(tokenizer))
    if ids is not None:
        resolved["token_ids"] |= {"think_open": ids[0], "think_close": ids[1]}
    return _without_nulls(resolved)


def apply_reward_penalties(
    results: list[dict[str, Any]], reward_penalty_config: Any
) -> dict[str, int]:
    """Set ``result["full_result"]["reward"]`` to 0.0 where a penalty applies, in place.

    The rules are :mod:`gymrl.scoring.penalties`; there the verifier's reward stays beside the
    total, here it is overwritten as callers of NeMo RL expect.

    Args:
        results: Each with ``full_result`` (``response.output`` in it), and ``message_log``
            (``user`` and ``assistant`` in turn) for the rules that look at tokens.
        reward_penalty_config: The block, resolved; None: nothing happens.

    Returns:
        How many results each penalty applied to, all four named.

    Raises:
        ConfigError: The block is wrong.
        RewardContractError: A reward is no finite number, with its place in `results`.
    """
    counts = dict.fromkeys(RULES, 0)
    penalties = resolve_penalties(penalty_config(reward_penalty_config))
    for index, result in enumerate(results if penalties else ()):
        full_result = result["full_result"]
        trajectory = trajectory_of(result, index)
        spoken = apply_penalties(trajectory, Answer(trajectory.result), penalties)
        for entry in spoken.reward.adjustments:
            counts[entry.rule] += 1
            full_result["reward"] = entry.value
    return counts


def compute_reward_penalty_metrics(
    penalty_counts: dict[str, int], num_results: int, reward_penalty_config: Any
) -> dict[str, float]:
    """The rate of each penalty that is on, under its metric's name; nothing without results.

    Args:
        penalty_counts: As :func:`apply_reward_penalties` returns them.
        num_results: Of how many results.
        reward_penalty_config: The block.
    """
    if not num_results:
        return {}
    enabled = resolve_penalties(penalty_config(reward_penalty_config))
    return {
        penalty.metric: penalty_counts.get(penalty.rule, 0) / num_results for penalty in enabled
    }


def extract_reward_components(nemo_gym_result: dict[str, Any]) -> dict[str, float] | None:
    """The ``reward_components`` of a verifier's answer; None for a reward of one part.

    Raises:
        RewardContractError: They are no numbers by name; a `ValueError`.
    """
    return reward_components(nemo_gym_result.get("reward_components"))


def build_reward_component_columns(
    component_dicts: list[dict[str, float] | None],
) -> dict[str, torch.Tensor]:
    """``reward/<name>`` columns, float32 ``[B]``: the union of names, sorted, 0.0 where absent."""
    columns = columns_of(component_dicts)
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def validate_reward_components_match_scalar(nemo_gym_results: list[dict[str, Any]]) -> None:
    """Hold each result of several rewards to ``reward == sum(reward_components)``.

    Raises:
        RewardContractError: The first that breaks it; a `ValueError`.
    """
    for index, result in enumerate(nemo_gym_results):
        where = f"result {index}: "
        components = reward_components(result.get("reward_components"), where)
        if components is not None:
            reward = Reward(reward_number(result.get("reward"), f"{where}reward"), components)
            check_reward_contract(reward, index)


def nemo_gym_rollout_hit_max_tokens(
    full_result: dict[str, Any] | None, *, total_tokens: int, max_total_tokens_per_sample: int
) -> bool:
    """Whether a token limit cut the rollout off; see :func:`gymrl.scoring.hit_max_tokens`.

    Args:
        full_result: The answer; its ``response.incomplete_details.reason`` counts.
        total_tokens: Of the whole message log.
        max_total_tokens_per_sample: The generator's context.
    """
    if total_tokens >= max_total_tokens_per_sample:
        return True
    value: Any = full_result
    for name in ("response", "incomplete_details", "reason"):
        value = value.get(name) if isinstance(value, dict) else None
    return is_length_reason(value)


def trajectory_of(result: dict[str, Any], index: int) -> Trajectory:
    """A result's message log and answer as a trajectory, for the rules that read one.

    Args:
        result: One of several.
        index: Which one, for the error.

    Raises:
        RewardContractError: Its reward is no finite number.
    """
    full_result = result["full_result"]
    parts: list[np.ndarray[Any, np.dtype[np.int32]]] = []
    turns: list[Turn] = []
    start = length = 0
    for message in result.get("message_log") or ():
        ids = np.asarray(message.get("token_ids", ()), dtype=np.int32)
        parts.append(ids)
        generation_start, length = length, length + len(ids)
        if message["role"] != "assistant":
            continue
        text = message.get("content")
        turns.append(
            Turn(
                start=start,
                generation_start=generation_start,
                end=length,
                generation_text=text if isinstance(text, str) else None,
                is_invalid_tool_call=bool(message.get("is_invalid_tool_call")),
                has_malformed_thinking=bool(message.get("has_malformed_thinking")),
            )
        )
        start = length
    return Trajectory(
        agent=(result.get("agent_ref") or {}).get("name", ""),
        token_ids=np.concatenate([*parts, np.empty(0, dtype=np.int32)]),
        logprobs=np.zeros(length, dtype=np.float32),
        turns=tuple(turns),
        reward=Reward(reward_number(full_result.get("reward"), f"result {index}: reward")),
        result=msgspec.json.encode(full_result),
    )
