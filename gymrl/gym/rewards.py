"""The verifier's verdict out of a decoded answer: reward, components, mask, reported failure.

A verdict that cannot be read fails the row. It is never read as 0, because a zero would enter the
group's baseline as if the model had earned it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymrl.errors import (
    GymSchemaError,
    RewardContractError,
    RolloutDataFailure,
    RolloutFailure,
    RolloutInfraFailure,
)
from gymrl.gym.schema import RunAnswer, is_null, plain
from gymrl.numbers import exact_sum, reward_number
from gymrl.types import Reward

if TYPE_CHECKING:
    import msgspec


def read_reward(answer: RunAnswer) -> Reward:
    """The verifier's reward as the first entry of a ledger.

    Raises:
        RewardContractError: The reward or a component is missing, null, no number (true and false
            are none), NaN or infinite, or the components do not add up to the reward.
    """
    value = _number(answer.reward, "reward")
    if is_null(answer.reward_components):
        return Reward(value)
    parts = plain(answer.reward_components)
    if not isinstance(parts, dict):
        raise RewardContractError(
            f"reward_components is {_shown(parts)}; an object of numbers by name is needed"
        )
    if not parts:
        return Reward(value)
    components = {
        name: reward_number(part, f"reward_components.{name}") for name, part in parts.items()
    }
    reward = Reward(value, components)
    if not reward.is_sum_of_components():
        total = exact_sum(components.values())
        raise RewardContractError(
            f"the verifier's reward is {value!r} but its reward_components sum to {total!r}; "
            "a multi-reward verifier must set reward to the sum of its components",
            reward=value,
            components=components,
        )
    return reward


def read_mask(answer: RunAnswer) -> bool:
    """Whether the environment asks to leave the sample out of the loss.

    The flag is the field ``mask_sample``, or ``instance_config.mask_sample``; either being true
    is enough, because servers send a false first-class field beside a true nested one.

    Raises:
        GymSchemaError: A flag is neither true, false nor null.
    """
    nested = plain(answer.instance_config)
    flags = {
        "mask_sample": plain(answer.mask_sample),
        "instance_config.mask_sample": (
            nested.get("mask_sample") if isinstance(nested, dict) else None
        ),
    }
    for path, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise GymSchemaError(
                f"{path} is {_shown(flag)}; true, false or null is needed", path=f"$.{path}"
            )
    return any(flags.values())


def raise_reported_failure(answer: RunAnswer) -> None:
    """Raise if the answer, though HTTP 200, says that the attempt failed.

    Gym's servers report a broken sandbox, a timed-out verifier and the like in
    ``_ng_failure_class``, with the reward forced to zero. ``_ng_failure_terminal`` says that
    another attempt would fail as well.

    Raises:
        RolloutDataFailure: The failure is terminal.
        RolloutInfraFailure: It is not.
    """
    if is_null(answer.failure_class):
        return
    terminal = plain(answer.failure_terminal) is True
    error: type[RolloutFailure] = RolloutDataFailure if terminal else RolloutInfraFailure
    message = plain(answer.failure_message)
    raise error(
        f"the environment reports {plain(answer.failure_class)!r}"
        + (f": {str(message)[:500]}" if message is not None else "")
    )


def _number(raw: msgspec.Raw, name: str) -> float:
    if len(memoryview(raw)) == 0:
        raise RewardContractError(f"{name} is missing; the verifier must set it")
    return reward_number(plain(raw), name)


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
