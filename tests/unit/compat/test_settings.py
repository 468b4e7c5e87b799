import pytest

from gymrl.compat.nemo_rl import (
    DEFAULT_INVALID_TOOL_CALL_PATTERNS,
    DEFAULT_THINKING_TAGS,
    EffortLevelsConfig,
    NemoGym,
    get_effort_config,
    get_nemo_gym_thinking_tags,
    get_nemo_gym_uv_cache_dir,
    get_nemo_gym_venv_dir,
    setup_nemo_gym_config,
    should_mask_flagged_samples,
    should_use_nemo_gym,
)
from gymrl.compat.nemo_rl.settings import model_limit, rollout_config, sampling_of
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError, ServerError, UnsupportedOptionError

AGENT = {"responses_api_agents": {"simple": {"entrypoint": "gymrl.gym.embedded.simple:Agent"}}}


class Namespace:
    def __init__(self, **fields):
        vars(self).update(fields)


def gym_config(**changes):
    return {
        "model_name": "policy",
        "base_urls": ["http://127.0.0.1:9/v1"],
        "initial_global_config_dict": {"math_agent": AGENT},
        **changes,
    }


def test_the_defaults_are_those_of_the_gym_room():
    assert DEFAULT_INVALID_TOOL_CALL_PATTERNS == [
        "<tool_call>",
        "</tool_call>",
        "<function_call>",
        "</function_call>",
    ]
    assert DEFAULT_THINKING_TAGS == ["<think>", "</think>"]


@pytest.mark.parametrize("as_object", [False, True])
def test_gym_is_used_when_env_says_so_and_the_policy_serves_http(as_object):
    vllm = {"async_engine": True, "expose_http_server": True}
    fields = {
        "env": {"should_use_nemo_gym": True},
        "policy": {"generation": {"backend": "vllm", "vllm_cfg": vllm}},
    }
    config = Namespace(**fields) if as_object else fields
    assert should_use_nemo_gym(config) is True
    vllm["expose_http_server"] = False
    with pytest.raises(AssertionError, match="expose_http_server=False"):
        should_use_nemo_gym(config)


def test_gym_is_not_used_by_default():
    assert should_use_nemo_gym({"env": {}, "policy": {}}) is False
    assert should_use_nemo_gym({"env": None, "policy": {}}) is False


def test_setting_up_changes_the_configuration_in_place():
    config = {"policy": {"generation": {"stop_strings": ["x"], "stop_token_ids": [3]}}}
    setup_nemo_gym_config(config, tokenizer=None)
    assert config["policy"]["generation"] == {
        "stop_strings": None,
        "stop_token_ids": None,
        "vllm_cfg": {"async_engine": True, "expose_http_server": True},
    }
    with pytest.raises(ConfigError, match=r"policy\.generation"):
        setup_nemo_gym_config({"policy": {}}, tokenizer=None)


def test_the_effort_block_is_found_in_either_place_with_its_defaults():
    assert get_effort_config({}) is None
    for env in (
        {"effort_levels": {"low_weight": 0.5, "low_string": "low"}},
        {"nemo_gym": {"effort_levels": {"low_weight": 0.5, "low_string": "low"}}},
    ):
        config = get_effort_config(env)
        assert config == EffortLevelsConfig(low_weight=0.5, low_string="low")
        assert (config.low_penalty, config.low_ub) == (1.0, 64000)
        assert config.validate_length_bound() is config
    with pytest.raises(ConfigError, match="leave one"):
        get_effort_config({"effort_levels": {}, "nemo_gym": {"effort_levels": {}}})


def test_an_effort_bound_that_would_divide_by_zero_is_refused():
    with pytest.raises(ValueError, match="low_ub=0"):
        get_effort_config({"effort_levels": {"low_weight": 1.0, "low_string": "x", "low_ub": 0}})


def test_thinking_tags_come_from_the_block_or_the_defaults():
    assert get_nemo_gym_thinking_tags({}) == ["<think>", "</think>"]
    assert get_nemo_gym_thinking_tags({"nemo_gym": {"thinking_tags": ["[", "]"]}}) == ["[", "]"]


@pytest.mark.parametrize(("value", "expected"), [(None, True), (True, True), (False, False)])
def test_flags_are_honored_unless_switched_off(value, expected):
    assert should_mask_flagged_samples({"should_mask_flagged_samples": value}) is expected
    assert should_mask_flagged_samples({}) is True
    with pytest.raises(ConfigError):
        should_mask_flagged_samples({"should_mask_flagged_samples": "no"})


def test_directories_come_from_the_environment(monkeypatch):
    for name in ("NRL_CONTAINER", "UV_CACHE_DIR", "XDG_CACHE_HOME", "NEMO_GYM_VENV_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert get_nemo_gym_uv_cache_dir() is None
    assert get_nemo_gym_venv_dir() is None
    monkeypatch.setenv("UV_CACHE_DIR", "/caches/uv")
    monkeypatch.setenv("NEMO_GYM_VENV_DIR", "/venvs")
    assert get_nemo_gym_uv_cache_dir() is None
    assert get_nemo_gym_venv_dir() == "/venvs"
    monkeypatch.setenv("NRL_CONTAINER", "1")
    assert get_nemo_gym_uv_cache_dir() == "/caches/uv"
    monkeypatch.delenv("UV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert get_nemo_gym_uv_cache_dir() == "/caches/uv"


def test_a_gym_dictionary_becomes_a_configuration():
    config = rollout_config(
        gym_config(
            port_range_low=4000,
            port_range_high=4100,
            thinking_tags=["[", "]"],
            invalid_tool_call_patterns=None,
            tokenizer_config={"name": "/models/tiny"},
            num_workers=2,
        )
    )
    assert config.gym.servers == {"math_agent": AGENT}
    assert config.gym.base_urls == ("http://127.0.0.1:9/v1",)
    assert (config.gym.port_range_low, config.gym.port_range_high) == (4000, 4100)
    assert config.gym.thinking_tags == ("[", "]")
    assert config.gym.invalid_tool_call_patterns == tuple(DEFAULT_INVALID_TOOL_CALL_PATTERNS)
    assert config.gym.tokenizer == "/models/tiny"
    assert config.num_workers == 2
    assert rollout_config(gym_config(), "/models/other").gym.tokenizer == "/models/other"


def test_a_head_server_without_instances_is_someone_elses_gym():
    head = {"head_server": {"host": "10.0.0.3", "port": 11000}}
    config = rollout_config(gym_config(initial_global_config_dict=head))
    assert config.gym.registry_url == "http://10.0.0.3:11000"
    with pytest.raises(ConfigError, match="host and port"):
        rollout_config(gym_config(initial_global_config_dict={"head_server": {"host": "x"}}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"initial_global_config_dict": {"config_paths": ["a.yaml"]}}, "config_paths"),
    ],
)
def test_what_this_road_does_not_have_is_refused_when_the_object_is_made(changes, text):
    with pytest.raises(UnsupportedOptionError, match=text):
        NemoGym(gym_config(**changes))


def test_a_wrong_gym_dictionary_is_refused_when_the_object_is_made():
    with pytest.raises(ConfigError, match="no base_urls"):
        NemoGym(gym_config(base_urls=None))
    with pytest.raises(ConfigError, match="thinking_tags"):
        NemoGym(gym_config(thinking_tags=["<think>"]))


def test_an_environment_that_is_not_spun_up_says_so():
    environment = NemoGym(gym_config())
    with pytest.raises(ServerError, match="_spinup"):
        environment.health_check()
    environment.shutdown()
    environment.shutdown()


def test_an_environment_has_no_steps():
    environment = NemoGym(gym_config())
    with pytest.raises(NotImplementedError, match="run_rollouts"):
        environment.step([], [])
    with pytest.raises(NotImplementedError, match="rollout_metrics"):
        environment.global_post_process_and_metrics({})


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        NemoGym(gym_config()).set_tokenizer(Namespace(encode=None))


def test_sampling_is_the_train_profile_unless_another_is_given():
    block = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 64,
        "stop_strings": None,
        "stop_token_ids": None,
    }
    assert sampling_of(block) == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64)
    profile = Namespace(temperature=0.5, top_p=1.0, top_k=None)
    assert sampling_of(block, profile) == SamplingParams(temperature=0.5, max_tokens=64)
    given = SamplingParams(temperature=0.1)
    assert sampling_of(block, given) is given
    assert sampling_of(None) == SamplingParams()


@pytest.mark.parametrize(
    "policy",
    [
        Namespace(max_model_len=128),
        Namespace(cfg={"vllm_cfg": {"max_model_len": 128}}),
        Namespace(cfg={"max_model_len": 128}),
    ],
)
def test_the_models_context_is_found_where_interfaces_keep_it(policy):
    assert model_limit(policy) == 128
    assert model_limit(None) is None
