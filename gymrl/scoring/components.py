"""Rewards of several parts: reading them, the contract on their sum, and columns over a batch.

A verifier that gives ``reward_components`` promises ``reward == sum(components)``. The promise is
checked on the verifier's own values, never on a total that rules have adjusted, so that a penalty
of ours does not make the verifier look wrong.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gymrl.errors import RewardContractError
from gymrl.numbers import exact_sum, reward_number
from gymrl.scoring.answer import Answer
from gymrl.types import Float32Array, Reward, Trajectory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gymrl.types import Failure


def reward_components(value: Any, where: str = "") -> dict[str, float] | None:
    """The ``reward_components`` of an answer, None for a reward of one part (null or empty).

    Args:
        value: As they came.
        where: Before the field's name in the error.

    Raises:
        RewardContractError: It is no mapping, or one of its values is no finite number.
    """
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise RewardContractError(
            f"{where}reward_components is a {type(value).__name__}; it must map names to numbers"
        )
    return {
        str(name): reward_number(part, f"{where}reward_components.{name}")
        for name, part in value.items()
    }


def read_reward(result: bytes | Answer) -> Reward:
    """The reward of a Gym answer as a fresh ledger, with its contract checked.

    Raises:
        RewardContractError: No finite number, or not the sum of its components.
        GymSchemaError: The answer is no JSON object.
    """
    answer = result if isinstance(result, Answer) else Answer(result)
    reward = Reward(
        verifier=reward_number(answer.value("reward")),
        components=reward_components(answer.value("reward_components")),
    )
    check_reward_contract(reward)
    return reward


def check_reward_contract(reward: Reward, row: int | None = None, agent: str | None = None) -> None:
    """Hold the verifier to ``reward == sum(components)``; nothing to hold without components.

    Equal means within 1e-5 relative or 1e-6 absolute. Only the verifier's values are looked at.

    Raises:
        RewardContractError: They differ, or a value is NaN or infinite.
    """
    parts = list((reward.components or {}).values())
    place = f"row {row}, agent {agent}: " if row is not None else ""
    if not all(math.isfinite(number) for number in (reward.verifier, *parts)):
        raise RewardContractError(
            f"{place}reward {reward.verifier} with components {reward.components}: "
            f"every value must be finite",
            row=row,
            agent=agent,
            components=reward.components,
        )
    if not reward.is_sum_of_components():
        total = exact_sum(parts)
        raise RewardContractError(
            f"{place}the verifier's reward is {reward.verifier} but its components sum to {total} "
            f"({reward.components}); a verifier of several rewards must set reward to their sum",
            row=row,
            agent=agent,
            reward=reward.verifier,
            components=reward.components,
        )


def component_columns(samples: Sequence[Trajectory | Failure]) -> dict[str, Float32Array]:
    """One float32 column ``[B]`` for each component of the batch, keyed ``reward/<name>``.

    The names are the union over the batch, sorted; a sample without the component, and a failed
    one, has 0.0 there, since every column must cover all samples. Empty without any component.
    """
    return columns_of(
        [sample.reward.components if isinstance(sample, Trajectory) else None for sample in samples]
    )


def columns_of(parts: Sequence[Mapping[str, float] | None]) -> dict[str, Float32Array]:
    """:func:`component_columns` of the components alone, None for a sample without any."""
    names = sorted({name for part in parts for name in part or {}})
    return {
        f"reward/{name}": np.array([(part or {}).get(name, 0.0) for part in parts], np.float32)
        for name in names
    }
