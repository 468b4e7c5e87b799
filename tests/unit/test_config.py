import sys
import typing
from typing import Literal

import msgspec
import numpy as np
import pytest

from gymrl import settings
from gymrl.config import (
    GenerationConfig,
    GymConfig,
    RolloutConfig,
    SamplingParams,
    VllmConfig,
    load,
    read_mapping,
)
from gymrl.errors import ConfigError
from gymrl.settings import parse_yaml


def test_an_unknown_key_is_refused_with_its_path():
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_dict({"gym": {"row_timeout": 3}, "generation": {"model": "m"}})
    assert str(caught.value) == (
        "gym.row_timeout: there is no such setting; did you mean 'row_timeout_s'?"
    )
    assert caught.value.setting == "gym.row_timeout"


def test_an_unknown_key_like_no_other_is_told_what_there_is():
    with pytest.raises(
        ConfigError, match=r"shards\[\.\.\.\]\.gpu: .*; there are: replicas, servers"
    ):
        RolloutConfig.from_dict({"gym": {}, "shards": {"a": {"gpu": 1}}})


@pytest.mark.parametrize(
    ("gym", "said"),
    [
        ({"row_timeout_s": -3}, "gym.row_timeout_s=-3.0: must be positive"),
        ({"media": {"max_redirects": -1}}, "gym.media.max_redirects=-1: must be 0 or more"),
        ({"base_urls": ["localhost:8000"]}, "gym.base_urls='localhost:8000': is no address"),
    ],
)
def test_a_value_of_a_block_is_refused_with_the_place_of_the_block(gym, said):
    with pytest.raises(ConfigError) as caught:
        RolloutConfig.from_dict({"gym": gym})
    assert str(caught.value).startswith(said)
    assert caught.value.setting == said.partition("=")[0]


@pytest.mark.parametrize(
    ("cls", "setting", "value"),
    [
        (GymConfig, "max_connections", -1),
        (GymConfig, "registry_url", "127.0.0.1:11000"),
        (GenerationConfig, "num_threads", -1),
        (VllmConfig, "base_urls", ["node1:8000"]),
    ],
)
def test_what_would_only_fail_in_a_worker_is_refused_when_it_is_built(cls, setting, value):
    needed = {"model": "m"} if cls is GenerationConfig else {}
    with pytest.raises(ConfigError, match=setting):
        cls(**needed, **{setting: value})


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


def test_a_stop_text_that_is_empty_is_refused():
    with pytest.raises(ConfigError, match="would end every call at once"):
        SamplingParams(stop=("END", ""))


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


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("-1E+4", -1e4), ("1.0e-5", 1e-5), (".5e1", 5.0), ("3", 3), ("e5", "e5")],
)
def test_numbers_in_yaml_are_written_as_everywhere(text, value):
    assert parse_yaml(text) == value
    assert type(parse_yaml(text)) is type(value)


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    file = tmp_path / "twice.yaml"
    file.write_text("seed: 1\ngym: {}\nseed: 2\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml does not parse: key 'seed' is given twice"):
        read_mapping(file)


def test_a_mapping_that_takes_another_over_may_change_its_keys():
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n"
    assert parse_yaml(text)["b"] == {"x": 1, "y": 3}


def test_a_file_that_is_no_text_does_not_parse(tmp_path):
    file = tmp_path / "picture.yaml"
    file.write_bytes(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"picture\.yaml does not parse: 'utf-8' codec"):
        read_mapping(file)


def test_json_may_be_indented_by_tabs(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{\n\t"a": {\n\t\t"b": 1e-3}}\n')
    assert read_mapping(file) == {"a": {"b": 1e-3}}


def test_an_empty_file_is_an_empty_mapping(tmp_path):
    file = tmp_path / "empty.yaml"
    file.write_text("")

    assert read_mapping(file) == {}


def test_gym_servers_that_run_need_no_policy_from_here():
    config = RolloutConfig(gym=GymConfig(registry_url="http://127.0.0.1:11000"))
    assert config.generation is None


POLICY = {"base_urls": ["http://127.0.0.1:1/v1"]}


def test_a_choice_misspelt_in_python_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="'raise', 'mask', 'drop_group'") as caught:
        RolloutConfig(gym=GymConfig.from_dict(POLICY), failure_policy="msk")
    assert caught.value.setting == "failure_policy"
    with pytest.raises(ConfigError, match="'messages', 'ledger', 'both'") as caught:
        RolloutConfig.from_dict({"gym": {**POLICY, "token_source": "message"}})
    assert caught.value.setting == "gym.token_source"


@pytest.mark.parametrize(
    ("cls", "setting", "value"),
    [
        (GymConfig, "base_urls", "http://127.0.0.1:1/v1"),
        (SamplingParams, "stop", "END"),
        (SamplingParams, "max_tokens", 2.5),
        (SamplingParams, "temperature", "1"),
        (SamplingParams, "seed", True),
        (GymConfig, "servers", ["math"]),
    ],
)
def test_a_wrong_type_is_refused_in_python_as_in_a_file(cls, setting, value):
    for build in (lambda: cls(**{setting: value}), lambda: cls.from_dict({setting: value})):
        with pytest.raises(ConfigError, match=r"Expected `.*`, got `.*`") as caught:
            build()
        assert caught.value.setting == setting


def test_what_only_looks_different_is_taken_in_python(tmp_path):
    gym = GymConfig(base_urls=["http://127.0.0.1:1/v1"], log_dir=tmp_path)
    assert gym == GymConfig(base_urls=("http://127.0.0.1:1/v1",), log_dir=str(tmp_path))
    assert RolloutConfig(gym={**POLICY, "log_dir": str(tmp_path)}).gym == gym
    sampling = SamplingParams(
        temperature=np.float32(0.5), max_tokens=np.int64(7), stop_token_ids=[np.int32(3)]
    )
    assert sampling.to_dict() | {"temperature": 0.5, "max_tokens": 7} == sampling.to_dict()
    assert sampling.stop_token_ids == (3,)
    assert [type(v) for v in (sampling.temperature, sampling.max_tokens)] == [float, int]


def test_the_settings_of_a_subclass_are_typed_too():
    class Settings(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
        mode: Literal["a", "b"] = "a"

    assert Settings(mode="b", temperature=1).temperature == 1.0
    with pytest.raises(ConfigError, match="choose 'a', 'b'"):
        Settings(mode="c")
    with pytest.raises(ConfigError, match="top_p"):
        Settings(top_p=2.0)


def test_a_port_range_ends_where_ports_end():
    with pytest.raises(ConfigError, match="below 65536"):
        GymConfig(port_range_low=65000, port_range_high=70000)


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (GymConfig, {"base_urls": ["http://127.0.0.1:1/v1", "https://user:sk-1234@policy/v1"]}),
        (GymConfig, {"registry_url": "http://sk-1234@registry:8000"}),
        (VllmConfig, {"base_urls": ["http://:sk-1234@node1:8000/v1"]}),
    ],
)
def test_a_key_in_an_address_is_refused_and_not_shown(cls, values):
    with pytest.raises(ConfigError, match="Put the key") as caught:
        cls(**values)
    assert "sk-1234" not in str(caught.value)
    assert GymConfig(base_urls=["http://127.0.0.1:1/v1/@scope"]).base_urls


def test_a_configuration_shows_no_key_that_a_server_is_given():
    block = {"policy_api_key": "sk-1234", "judge": [{"openai_api_key": "sk-5678"}], "max_tokens": 5}
    config = GymConfig(servers={**block, "hf_token": "${oc.env:HF_TOKEN}"}, model_name="policy")
    assert "sk-" not in repr(config) + str(config) + f"{config}"
    assert "max_tokens': 5" in repr(config)
    assert "${oc.env:HF_TOKEN}" in repr(config)
    assert "model_name='policy'" in repr(config)
    assert config.servers["policy_api_key"] == "sk-1234"
    assert "api_key_env='OPENAI_API_KEY'" in repr(VllmConfig(api_key_env="OPENAI_API_KEY"))
    assert repr(SamplingParams(seed=3)).startswith("SamplingParams(temperature=1.0, top_p=1.0")


def test_servers_by_url_are_not_forgotten_where_another_backend_is_asked_for():
    """The model was loaded here, and the servers were never asked."""
    servers = VllmConfig(base_urls=("http://a:8000",))
    with pytest.raises(ConfigError, match="set backend: vllm") as caught:
        GenerationConfig(model="m", vllm=servers)
    assert caught.value.setting == "vllm.base_urls"
    assert GenerationConfig(model="m", backend="vllm", vllm=servers).vllm is servers


def test_settings_of_a_class_that_derives_from_the_one_that_is_wanted_are_taken():
    class OwnVllmConfig(VllmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
        note: str = ""

    own = OwnVllmConfig(note="mine")
    assert GenerationConfig(model="m", vllm=own).vllm is own
    with pytest.raises(ConfigError, match="vllm: Expected"):
        GenerationConfig(model="m", vllm=GymConfig())


def test_settings_that_are_built_for_every_call_read_no_annotations_again():
    SamplingParams(seed=1)
    files = set()

    def note(frame, event, arg):
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        SamplingParams(seed=2)
    finally:
        sys.setprofile(None)
    assert settings.__file__ in files
    assert not files & {typing.__file__, msgspec.structs.__file__}
