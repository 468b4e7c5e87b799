"""Numbers that come from verifiers, environments and datasets: what counts as one.

JSON's true and false are no numbers here. A verifier that answers true may mean "passed" or may
have put a flag in the wrong field; neither is for a trainer to guess.
"""

from __future__ import annotations

import math
from typing import Any

from gymrl.errors import RewardContractError

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


def reward_number(value: Any, name: str = "reward") -> float:
    """A reward, or one part of it, as a finite float.

    Args:
        value: As it came.
        name: The field, with its row where the caller knows it, for the error.

    Raises:
        RewardContractError: It is missing, a boolean, a text, NaN or infinite: no number to train
            on. An attempt without one is a failure, not a reward of 0.
    """
    number = finite_float(value)
    if number is not None:
        return number
    remedy = "; true and false are no numbers, give 1.0 or 0.0" if isinstance(value, bool) else ""
    raise RewardContractError(f"{name} is {_shown(value)}; a finite number is needed{remedy}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
