"""Settings of the length penalty. Everything wrong with them is found when they are built."""

from __future__ import annotations

import math
from typing import Any, Literal

from gymrl.config import Config, require
from gymrl.errors import ConfigError

Channel = Literal["total", "reasoning", "answer"]
CHANNELS: tuple[Channel, ...] = ("reasoning", "answer", "total")
"""The three lengths of a rollout, in the order in which rules go through them."""

# A negative amount would turn a penalty into a bonus, and the other way round.
_AMOUNTS = (
    "reasoning_bonus",
    "answer_bonus",
    "total_bonus",
    "longest_reasoning_penalty",
    "longest_answer_penalty",
    "longest_total_penalty",
    "group_reasoning_length_penalty_coeff",
    "group_answer_length_penalty_coeff",
    "group_total_length_penalty_coeff",
    "reasoning_zmad_penalty",
    "answer_zmad_penalty",
    "total_zmad_penalty",
    "profiled_length_penalty",
    "pass_rate_length_penalty_weight",
)
_NUMBERS = (
    "reasoning_zmad_threshold",
    "answer_zmad_threshold",
    "total_zmad_threshold",
    "profiled_length_n_std",
)


class LengthRules(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules for one agent's groups. An amount of 0 switches its rule off.

    Attributes:
        enabled: False leaves the agent's groups alone, without a warning.
        length_type: ``tokens`` (by the tokenizer) or ``chars``.
        top_percentile: Share of the positive rollouts, by score, that count as top scorers.
        reasoning_bonus: For the shortest positive rollout by reasoning.
        answer_bonus: The same by answer.
        total_bonus: The same by reasoning and answer together.
        longest_reasoning_penalty: For the longest top scorer by reasoning.
        longest_answer_penalty: The same by answer.
        longest_total_penalty: The same by total.
        group_reasoning_length_penalty_coeff: Weight of group-relative scaling by reasoning.
        group_answer_length_penalty_coeff: The same by answer.
        group_total_length_penalty_coeff: The same by total.
        reasoning_zmad_threshold: Modified z above which a reasoning is an outlier; 0: off.
        reasoning_zmad_penalty: What such an outlier loses.
        answer_zmad_threshold: The same by answer.
        answer_zmad_penalty: The same by answer.
        total_zmad_threshold: The same by total.
        total_zmad_penalty: The same by total.
        profiled_length_penalty: What a rollout loses that reaches the row's profiled length.
        profiled_length_n_std: That length is the profile's mean and so many deviations.
        profiled_length_min_samples: Fewer passing profiled rollouts: no profiled length.
        pass_rate_length_penalty_weight: Weight of the penalty that grows with the pass rate.
        profile_band_total: Scale rewards by the total's band. None: where the configuration lists
            a default band for the channel.
        profile_band_reasoning: The same by reasoning.
        profile_band_answer: The same by answer.
        group_length_penalty_profile_gate: Group-relative scaling only for groups that are longer
            than their profile.
        group_length_penalty_profile_gate_channel: The length that is compared.
        group_length_penalty_profile_gate_field: The field of the band it is compared with.
        group_length_penalty_profile_gate_positive_only: Average positive rollouts only.
    """

    enabled: bool = True
    length_type: Literal["tokens", "chars"] = "tokens"
    top_percentile: float = 0.5
    reasoning_bonus: float = 0.0
    answer_bonus: float = 0.0
    total_bonus: float = 0.0
    longest_reasoning_penalty: float = 0.0
    longest_answer_penalty: float = 0.0
    longest_total_penalty: float = 0.0
    group_reasoning_length_penalty_coeff: float = 0.0
    group_answer_length_penalty_coeff: float = 0.0
    group_total_length_penalty_coeff: float = 0.0
    reasoning_zmad_threshold: float = 0.0
    reasoning_zmad_penalty: float = 0.0
    answer_zmad_threshold: float = 0.0
    answer_zmad_penalty: float = 0.0
    total_zmad_threshold: float = 0.0
    total_zmad_penalty: float = 0.0
    profiled_length_penalty: float = 0.0
    profiled_length_n_std: float = 1.0
    profiled_length_min_samples: int = 2
    pass_rate_length_penalty_weight: float = 0.0
    profile_band_total: bool | None = None
    profile_band_reasoning: bool | None = None
    profile_band_answer: bool | None = None
    group_length_penalty_profile_gate: bool = False
    group_length_penalty_profile_gate_channel: Channel = "total"
    group_length_penalty_profile_gate_field: Literal["a", "b", "f"] = "a"
    group_length_penalty_profile_gate_positive_only: bool = True

    def __post_init__(self) -> None:
        for name in _AMOUNTS:
            value = getattr(self, name)
            require(
                math.isfinite(value) and value >= 0,
                name,
                value,
                "must be a finite number, 0 or more (0 switches the rule off)",
            )
        for name in _NUMBERS:
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "must be finite")
        require(
            0 < self.top_percentile <= 1,
            "top_percentile",
            self.top_percentile,
            "must be above 0 and at most 1",
        )
        require(
            self.profiled_length_min_samples > 0,
            "profiled_length_min_samples",
            self.profiled_length_min_samples,
            "must be positive",
        )

    def amount(self, template: str, channel: Channel) -> float:
        """The number of a per-channel setting, ``template`` having the channel's place as ``{}``."""
        value: float = getattr(self, template.format(channel))
        return value


class Band(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A multiplier of the reward over a length: 1 up to `a`, linear down to `f` at `b`, then `f`."""

    a: float
    b: float
    f: float

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.a) and math.isfinite(self.b) and self.b > self.a,
            "profile_band.b",
            self.b,
            f"must be above a={self.a}",
        )
        require(0 <= self.f <= 1, "profile_band.f", self.f, "must be within 0 and 1")


class BandDefaults(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bands for rows that bring none, by channel; a channel listed here is on."""

    total: Band | None = None
    reasoning: Band | None = None
    answer: Band | None = None


class ProfileBandConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bands of the whole configuration.

    Attributes:
        enabled: False sets `defaults` aside.
        defaults: By channel.
    """

    enabled: bool = False
    defaults: BandDefaults = BandDefaults()


class LengthPenaltyConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``length_penalty`` block.

    Attributes:
        verbose: Keep a report of each group: lengths, gate, what every rule did.
        default: The rules of every agent without an override.
        agent_overrides: By agent, the keys it sets differently; null is the default.
        profile_band: Bands for rows that bring none.
    """

    verbose: bool = False
    default: LengthRules = LengthRules()
    agent_overrides: dict[str, dict[str, Any] | None] | None = None
    profile_band: ProfileBandConfig | None = None

    def __post_init__(self) -> None:
        for agent in self.agent_overrides or {}:
            self.rules_for(agent)

    def rules_for(self, agent: str) -> LengthRules:
        """The rules of an agent: the default's, with the keys of its override replaced.

        Raises:
            ConfigError: The override has an unknown key or a wrong value (found when built).
        """
        override = (self.agent_overrides or {}).get(agent)
        if not override:
            return self.default
        try:
            return LengthRules.from_dict({**self.default.to_dict(), **override})
        except ConfigError as error:
            raise ConfigError(
                f"length_penalty.agent_overrides.{agent}: {error}", setting=error.setting
            ) from error

    def default_bands(self) -> dict[Channel, Band]:
        """The bands of the configuration, by channel; empty when they are off."""
        if self.profile_band is None or not self.profile_band.enabled:
            return {}
        found: dict[Channel, Band] = {}
        for channel in CHANNELS:
            band: Band | None = getattr(self.profile_band.defaults, channel)
            if band is not None:
                found[channel] = band
        return found

    @property
    def needs_tokens(self) -> bool:
        """Whether any agent's lengths are counted in tokens."""
        rules = [self.default, *(self.rules_for(agent) for agent in self.agent_overrides or {})]
        return any(rule.enabled and rule.length_type == "tokens" for rule in rules)
