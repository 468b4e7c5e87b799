import pytest

from gymrl.config import (
    GenerationConfig,
    GymConfig,
    RolloutConfig,
    SamplingParams,
    load,
    read_mapping,
)
from gymrl.errors import ConfigError


def test_an_unknown_key_is_refused_with_its_path():
    with pytest.raises(ConfigError, match=r"unknown field `row_timeout` - at `\$.gym`"):
        RolloutConfig.from_dict({"gym": {"row_timeout": 3}, "generation": {"model": "m"}})


def test_a_value_out_of_range_names_the_setting_the_value_and_the_remedy():
    with pytest.raises(ConfigError, match=r"top_p=1\.5: must be above 0 and at most 1") as caught:
        SamplingParams(top_p=1.5)

    assert caught.value.setting == "top_p"


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -0.1])
def test_a_temperature_that_is_no_temperature_is_refused(temperature):
    with pytest.raises(ConfigError, match="temperature"):
        SamplingParams(temperature=temperature)


def test_a_wrong_type_is_refused_and_not_converted():
    with pytest.raises(ConfigError, match="Expected `int"):
        SamplingParams.from_dict({"max_tokens": "12"})


def test_settings_survive_the_way_through_plain_data():
    config = RolloutConfig(
        generation=GenerationConfig(model="m", max_batch_size=1),
        gym=GymConfig(servers={"a": {}}),
        sampling=SamplingParams(temperature=0.7, stop=("\n",)),
    )

    assert RolloutConfig.from_dict(config.to_dict()) == config


def test_servers_to_start_and_a_registry_of_servers_that_run_exclude_each_other():
    with pytest.raises(ConfigError, match="registry_url"):
        GymConfig(servers={"a": {}}, registry_url="http://127.0.0.1:1")


def test_a_port_range_needs_both_ends():
    with pytest.raises(ConfigError, match="port_range_low"):
        GymConfig(port_range_low=10001)


def test_a_rollout_needs_someone_who_generates_and_only_one():
    with pytest.raises(ConfigError, match="generation"):
        RolloutConfig(gym=GymConfig())
    with pytest.raises(ConfigError, match="generation"):
        RolloutConfig(
            gym=GymConfig(base_urls=("http://127.0.0.1:1/v1",)),
            generation=GenerationConfig(model="m"),
        )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "model: m\nmax_batch_size: 4\n"),
        ("a.toml", 'model = "m"\nmax_batch_size = 4\n'),
        ("a.json", '{"model": "m", "max_batch_size": 4}'),
    ],
)
def test_a_configuration_file_may_be_yaml_toml_or_json(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)

    assert load(GenerationConfig, file) == GenerationConfig(model="m", max_batch_size=4)


def test_an_error_in_a_file_names_the_file(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model: m\nport: 70000\n")

    with pytest.raises(ConfigError, match=r"a\.yaml: port=70000"):
        load(GenerationConfig, file)


def test_a_missing_file_and_a_file_that_does_not_parse_are_configuration_errors(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_mapping(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match="does not parse"):
        read_mapping(broken)
    listing = tmp_path / "list.yaml"
    listing.write_text("- 1\n")
    with pytest.raises(ConfigError, match="a mapping is needed"):
        read_mapping(listing)


def test_an_empty_file_is_an_empty_mapping(tmp_path):
    file = tmp_path / "empty.yaml"
    file.write_text("")

    assert read_mapping(file) == {}


def test_gym_servers_that_run_need_no_policy_from_here():
    config = RolloutConfig(gym=GymConfig(registry_url="http://127.0.0.1:11000"))
    assert config.generation is None
