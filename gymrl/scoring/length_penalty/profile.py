"""What a row says about the lengths of its prompt, and the gate that compares a group with it.

Read are ``profiled_rewards``, ``profiled_output_lengths`` and ``profile_band`` at the row's top
level; the same names under any nested key are never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gymrl.errors import ConfigError
from gymrl.scoring.answer import finite_number
from gymrl.scoring.length_penalty.config import CHANNELS, Band, Channel
from gymrl.scoring.stats import mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gymrl.scoring.answer import RowBody
    from gymrl.scoring.length_penalty.config import LengthRules
    from gymrl.scoring.length_penalty.lengths import Lengths

GateReason = Literal[
    "disabled",
    "missing_profile_limit",
    "unknown_channel",
    "no_lengths",
    "mean_le_limit",
    "mean_gt_limit",
]


class LengthProfile(msgspec.Struct, frozen=True):
    """The length metadata of a prompt.

    Attributes:
        passing: Profiled lengths whose reward was above 0.
        bands: By channel, the numbers the row or the configuration gives for ``a``, ``b``, ``f``.
        problems: What in the row could not be used.
    """

    passing: tuple[float, ...] = ()
    bands: dict[Channel, dict[str, float]] = {}
    problems: tuple[str, ...] = ()

    def band(self, channel: Channel) -> Band | None:
        """The channel's band, when it is whole and valid."""
        try:
            return Band.from_dict(dict(self.bands[channel]))
        except (KeyError, ConfigError):
            return None


class GateDecision(msgspec.Struct, frozen=True):
    """Whether group-relative scaling happens, and why.

    Attributes:
        open: It does.
        reason: Why.
        mean: The group's mean length, where one was taken.
        limit: What it was compared with.
    """

    open: bool
    reason: GateReason
    mean: float | None = None
    limit: float | None = None


def read_profile(row: RowBody, defaults: Mapping[Channel, Band]) -> LengthProfile:
    """The profile of a row; channels that the row leaves out (or null) have the default's band.

    A row's channel that cannot be used is not replaced by the default: its prompt then has no band
    there, and the problem is named.
    """
    problems: list[str] = []
    bands: dict[Channel, dict[str, float]] = {
        channel: {"a": band.a, "b": band.b, "f": band.f} for channel, band in defaults.items()
    }
    given = row.value("profile_band")
    if isinstance(given, dict):
        for channel in CHANNELS:
            if given.get(channel) is not None:
                bands[channel] = _numbers(given[channel])
                try:
                    Band.from_dict(dict(bands[channel]))
                except ConfigError as error:
                    problems.append(f"profile_band.{channel} of the row is no band: {error}")
    elif given is not None:
        problems.append(f"profile_band of the row is a {type(given).__name__}, not a mapping")
    passing, problem = _passing_lengths(row)
    if problem:
        problems.append(problem)
    return LengthProfile(passing, bands, tuple(problems))


def gate_decision(
    rules: LengthRules,
    profile: LengthProfile,
    lengths: Sequence[Lengths],
    scores: Sequence[float],
) -> GateDecision:
    """Decide a group's gate as its agent's rules say (:func:`compare_with_limit`)."""
    if not rules.group_length_penalty_profile_gate:
        return GateDecision(open=True, reason="disabled")
    channel = rules.group_length_penalty_profile_gate_channel
    positive_only = rules.group_length_penalty_profile_gate_positive_only
    return compare_with_limit(
        channel,
        profile.bands.get(channel, {}).get(rules.group_length_penalty_profile_gate_field),
        [
            rollout.of(channel)
            for rollout, score in zip(lengths, scores, strict=True)
            if score > 0 or not positive_only
        ],
    )


def compare_with_limit(channel: str, limit: float | None, lengths: Sequence[float]) -> GateDecision:
    """Open when the mean length is above the limit; closed when that cannot be told.

    Args:
        channel: One of ``total``, ``reasoning``, ``answer``.
        limit: The band's field; None: no band.
        lengths: Of the rollouts to average.
    """
    if channel not in CHANNELS:
        return GateDecision(open=False, reason="unknown_channel")
    if limit is None:
        return GateDecision(open=False, reason="missing_profile_limit")
    if not lengths:
        return GateDecision(open=False, reason="no_lengths", limit=limit)
    center = mean(lengths)
    if center > limit:
        return GateDecision(open=True, reason="mean_gt_limit", mean=center, limit=limit)
    return GateDecision(open=False, reason="mean_le_limit", mean=center, limit=limit)


def _passing_lengths(row: RowBody) -> tuple[tuple[float, ...], str | None]:
    rewards, lengths = row.value("profiled_rewards"), row.value("profiled_output_lengths")
    if rewards is None or lengths is None:
        return (), None
    if (
        not isinstance(rewards, list)
        or not isinstance(lengths, list)
        or len(rewards) != len(lengths)
    ):
        return (), (
            "profiled_rewards and profiled_output_lengths of the row are not two lists of one "
            "length; its profile is not used"
        )
    numbers = [(finite_number(r), finite_number(n)) for r, n in zip(rewards, lengths, strict=True)]
    return tuple(
        length
        for reward, length in numbers
        if reward is not None and reward > 0 and length is not None
    ), None


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    given = {name: value.get(name) for name in ("a", "b", "f")}
    found = {n: finite_number(v) for n, v in given.items() if not isinstance(v, bool)}
    return {name: number for name, number in found.items() if number is not None}
