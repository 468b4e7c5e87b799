"""Numbers that come from verifiers, environments and datasets: what counts as one.

JSON's true and false are no numbers here. A verifier that answers true may mean "passed" or may
have put a flag in the wrong field; neither is for a trainer to guess.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gymrl.errors import RewardContractError

if TYPE_CHECKING:
    from collections.abc import Collection

LARGEST_REWARD = float.fromhex("0x1.fffffep+127")
"""The largest float32. A reward beyond it would be infinite in a batch, and with it every baseline."""

_SHOWN = 60


def finite_float(value: Any) -> float | None:
    """An int or a float as a finite float; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond floats
        return None
    return number if math.isfinite(number) else None


def exact_sum(values: Collection[float]) -> float:
    """The correctly rounded sum of finite floats; infinite where it is beyond floats."""
    try:
        return math.fsum(values)
    except OverflowError:  # on the way, if not at the end
        return math.fsum(value / len(values) for value in values) * len(values)


def is_reward(value: float) -> bool:
    """Whether a float is finite, as float32 too."""
    return abs(value) <= LARGEST_REWARD


def reward_number(value: Any, name: str = "reward") -> float:
    """A reward, or one part of it, as a float that is finite as float32 too.

    Args:
        value: As it came.
        name: The field, with its row where the caller knows it, for the error.

    Raises:
        RewardContractError: It is missing, a boolean, a text, NaN, infinite or beyond
            :data:`LARGEST_REWARD`: no number to train on. An attempt without one is a failure, not
            a reward of 0.
    """
    number = finite_float(value)
    if number is not None and is_reward(number):
        return number
    if number is not None:
        raise RewardContractError(
            f"{name} is {_shown(value)}; at most {LARGEST_REWARD:.2g} fits the float32 of a batch"
        )
    remedy = "; true and false are no numbers, give 1.0 or 0.0" if isinstance(value, bool) else ""
    raise RewardContractError(f"{name} is {_shown(value)}; a finite number is needed{remedy}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
