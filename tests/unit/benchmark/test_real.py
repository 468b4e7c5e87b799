"""What Gym is asked to read for a benchmark: files by path, overrides, and no more of the policy than needed."""

import pytest
from omegaconf import OmegaConf

from gymrl.benchmark.real import gym_servers, real_instances, with_model_server
from gymrl.benchmark.roots import BenchmarkSource, SearchRoot
from gymrl.errors import ConfigError

OVERRIDES = {
    "policy_base_url": "http://127.0.0.1:1/v1",
    "policy_api_key": "secret",
    "policy_model_name": "m",
    "judge": {"responses_api_models": {"openai_model": {"openai_model": "j"}}},
}


@pytest.fixture
def roots(tmp_path):
    for name in ("vllm_model", "openai_model"):
        folder = tmp_path / "responses_api_models" / name / "configs"
        folder.mkdir(parents=True)
        (folder / f"{name}.yaml").touch()
    return [SearchRoot(tmp_path)]


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "benchmarks" / "b" / "config.yaml"
    return BenchmarkSource(
        name="b", file=file, config_path="benchmarks/b/config.yaml", presets={"flavor": "f"}
    )


def test_a_relay_of_ours_keeps_the_policys_address_and_key(source, roots):
    assert gym_servers(source, OVERRIDES, "openai_model", roots) == {
        "work_dir": ".",
        "flavor": "f",
        "judge": OVERRIDES["judge"],
        "config_paths": [str(source.file)],
    }


def test_a_model_server_of_gyms_is_told_them(source, roots, tmp_path):
    servers = gym_servers(source, OVERRIDES, "vllm_model", roots)

    assert servers["policy_api_key"] == "secret"
    assert servers["config_paths"] == [
        str(source.file),
        str(tmp_path / "responses_api_models/vllm_model/configs/vllm_model.yaml"),
    ]


def test_files_of_the_overrides_come_last(source, roots):
    servers = gym_servers(source, {"config_paths": ["judge.yaml"]}, "openai_model", roots)

    assert servers["config_paths"] == [str(source.file), "judge.yaml"]


def test_before_servers_of_ours_gym_reads_its_model_servers_file_alone(roots, tmp_path):
    ours = {"math": {"resources_servers": {"ours": {"entrypoint": "m:Ours"}}}}
    policy_model = {"responses_api_models": {"vllm_model": {"extra_body": {}}}}

    servers = with_model_server(
        ours, OVERRIDES | {"policy_model": policy_model, "num_tasks": 3}, "vllm_model", roots
    )

    assert servers == {
        **ours,
        "policy_base_url": "http://127.0.0.1:1/v1",
        "policy_api_key": "secret",
        "policy_model_name": "m",
        "policy_model": policy_model,
        "config_paths": [str(tmp_path / "responses_api_models/vllm_model/configs/vllm_model.yaml")],
    }


@pytest.mark.parametrize("model_type", ["vlm_model", "../vllm_model", ""])
def test_a_model_type_that_is_not_there_is_refused_with_those_that_are(source, roots, model_type):
    with pytest.raises(ConfigError, match=r"There are: openai_model, vllm_model") as caught:
        gym_servers(source, OVERRIDES, model_type, roots)
    assert caught.value.setting == "model_type"


def test_real_are_scripts_that_nobody_runs_yet():
    script = {"entrypoint": "app.py"}
    config = OmegaConf.create(
        {
            "real": {"resources_servers": {"a": script}},
            "elsewhere": {"resources_servers": {"a": script | {"port": 9}}},
            "ours": {"resources_servers": {"b": {"entrypoint": "b:B"}}},
            "judge": {"responses_api_models": {"c": script}},
            "known": {"responses_api_models": {"c": script | {"base_url": "http://x/v1"}}},
            "policy_model": {"responses_api_models": {"c": script}},
            "relay": {"environment_servers": {"legacy_agent": script}},
            "episodes": {"environment_servers": {"single_agent_turn": script}},
        }
    )
    assert list(real_instances(config)) == ["episodes", "judge", "real"]
