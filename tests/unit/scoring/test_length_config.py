import pytest

from gymrl.errors import ConfigError
from gymrl.scoring.length_penalty import Band, LengthPenaltyConfig, LengthRules


def build(**values):
    return LengthPenaltyConfig.from_dict(values)


def test_the_defaults_change_nothing():
    rules = LengthRules()
    assert rules.enabled
    assert rules.length_type == "tokens"
    assert rules.top_percentile == 0.5
    assert rules.profiled_length_n_std == 1.0
    assert rules.profiled_length_min_samples == 2
    assert rules.group_length_penalty_profile_gate is False
    assert rules.group_length_penalty_profile_gate_channel == "total"
    assert rules.group_length_penalty_profile_gate_field == "a"
    assert rules.group_length_penalty_profile_gate_positive_only is True


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"defaults": {}}, "defaults"),
        ({"default": {"total_bonsu": 0.1}}, "total_bonsu"),
        ({"default": {"length_type": "words"}}, "words"),
        ({"default": {"group_length_penalty_profile_gate_channel": "both"}}, "both"),
        ({"default": {"group_length_penalty_profile_gate_field": "c"}}, "'c'"),
        ({"default": {"total_bonus": -0.1}}, "total_bonus"),
        ({"default": {"total_zmad_penalty": float("nan")}}, "total_zmad_penalty"),
        ({"default": {"total_zmad_threshold": float("inf")}}, "total_zmad_threshold"),
        ({"default": {"top_percentile": 0.0}}, "top_percentile"),
        ({"default": {"top_percentile": 1.5}}, "top_percentile"),
        ({"default": {"profiled_length_min_samples": 0}}, "profiled_length_min_samples"),
        ({"agent_overrides": {"math": {"total_bonsu": 0.1}}}, "math.*total_bonsu"),
        ({"agent_overrides": {"math": {"total_bonus": -1.0}}}, "math.*total_bonus"),
        ({"agent_overrides": {"math": {"length_type": "words"}}}, "math.*words"),
        ({"profile_band": {"enabled": True, "default": {}}}, "default"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(values, named):
    with pytest.raises(ConfigError, match=named):
        build(**values)


@pytest.mark.parametrize(
    ("band", "named"),
    [
        ({"a": 10, "b": 10, "f": 0.5}, "profile_band.b"),
        ({"a": 10, "b": 9, "f": 0.5}, "profile_band.b"),
        ({"a": 10, "b": 20, "f": 1.1}, "profile_band.f"),
        ({"a": 10, "b": 20, "f": -0.1}, "profile_band.f"),
        ({"a": 10, "b": 20}, "`f`"),
        ({"a": 10, "f": 0.5}, "`b`"),
        ({"a": "10", "b": 20, "f": 0.5}, "float"),
    ],
)
@pytest.mark.parametrize("channel", ["total", "reasoning", "answer"])
def test_a_band_that_is_none_is_refused(band, named, channel):
    with pytest.raises(ConfigError, match=named):
        build(profile_band={"enabled": True, "defaults": {channel: band}})


def test_an_override_replaces_only_the_keys_it_sets():
    config = build(
        default={"total_bonus": 0.1, "answer_bonus": 0.2, "length_type": "chars"},
        agent_overrides={"math": {"total_bonus": 0.3}, "code": None},
    )
    assert config.rules_for("math") == LengthRules(
        total_bonus=0.3, answer_bonus=0.2, length_type="chars"
    )
    assert config.rules_for("code") == config.default
    assert config.rules_for("chat") == config.default


def test_an_override_may_switch_an_agent_off_or_on():
    config = build(
        default={"enabled": False}, agent_overrides={"math": {"enabled": True}, "code": {}}
    )
    assert config.rules_for("math").enabled
    assert not config.rules_for("code").enabled


def test_bands_of_the_configuration_count_only_when_enabled():
    band = {"a": 10, "b": 20, "f": 0.5}
    assert build(profile_band={"defaults": {"total": band}}).default_bands() == {}
    assert build(profile_band={"enabled": True, "defaults": {"total": band}}).default_bands() == {
        "total": Band(a=10, b=20, f=0.5)
    }
    assert build().default_bands() == {}


def test_a_configuration_survives_a_round_trip():
    config = build(
        verbose=True,
        default={"total_bonus": 0.1},
        agent_overrides={"math": {"enabled": False}},
        profile_band={"enabled": True, "defaults": {"answer": {"a": 1, "b": 2, "f": 0}}},
    )
    assert LengthPenaltyConfig.from_dict(config.to_dict()) == config


def test_tokens_are_needed_where_an_enabled_agent_counts_them():
    assert build().needs_tokens
    assert not build(default={"length_type": "chars"}).needs_tokens
    assert not build(default={"enabled": False}).needs_tokens
    assert build(
        default={"length_type": "chars"}, agent_overrides={"math": {"length_type": "tokens"}}
    ).needs_tokens
