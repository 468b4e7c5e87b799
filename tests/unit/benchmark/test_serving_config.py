import pytest
from omegaconf import OmegaConf

from gymrl.benchmark import serve_benchmark
from gymrl.benchmark.planned_servers import planned_servers
from gymrl.benchmark.serving import serving_config
from gymrl.errors import ConfigError, RealServersError

POLICY = {
    "policy_base_url": "http://127.0.0.1:1/v1",
    "policy_api_key": "secret",
    "policy_model_name": "m",
}
OURS = {"entrypoint": "gymrl.gym.embedded.tool_arithmetic:ToolArithmeticServer"}


def config(**keys):
    return OmegaConf.create({"math": {"resources_servers": {"ours": OURS}}} | POLICY | keys)


def test_overrides_become_settings_of_the_worker():
    made = serving_config(
        config(
            math={"resources_servers": {"ours": OURS | {"model": "${policy_model_name}"}}},
            server_spinup_timeout_seconds=7,
            model_endpoint_readiness_timeout_seconds=0,
            head_server={"port": 11000},
        ),
        None,
    )

    assert made.base_urls == ("http://127.0.0.1:1/v1",)
    assert (made.api_key, made.gym.model_name) == ("secret", "m")
    assert made.gym.servers["math"]["resources_servers"]["ours"]["model"] == "m"
    assert made.gym.spinup_timeout_s == 7
    assert made.readiness_timeout_s == float("inf")
    assert made.registry_port == 11000
    assert serving_config(config(head_server={"port": 11000}), 12000).registry_port == 12000


def test_datasets_are_no_part_of_serving():
    dataset = {"name": "x", "jsonl_fpath": "${work_dir}/x.jsonl"}
    block = {"resources_servers": {"ours": OURS | {"datasets": [dataset]}}}

    assert serving_config(config(math=block), None).gym.servers["math"] == {
        "resources_servers": {"ours": OURS}
    }


@pytest.mark.parametrize("name", ["policy_base_url", "policy_model_name"])
def test_a_policy_that_is_not_named_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=.* in overrides") as caught:
        serving_config(config(**{name: None}), None)
    assert caught.value.setting == name


def test_a_policy_may_have_several_endpoints_and_no_key():
    urls = ["http://a/v1", "https://b/v1"]
    made = serving_config(config(policy_base_url=urls, policy_api_key=None), None)

    assert made.base_urls == ("http://a/v1", "https://b/v1")
    assert made.api_key is None


@pytest.mark.parametrize("url", ["localhost:8000", 8000, ["ftp://x"]])
def test_a_base_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="policy_base_url="):
        serving_config(config(policy_base_url=url), None)


def test_nemo_gyms_own_servers_are_refused_by_name():
    agent = {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py"}}}
    judge = {"responses_api_models": {"openai_model": {"entrypoint": "app.py"}}}

    with pytest.raises(
        RealServersError, match=r"own servers: agent \(app\.py\), judge \(app\.py\), which are"
    ):
        serving_config(config(agent=agent, judge=judge), None)


def test_servers_that_run_elsewhere_and_relays_are_not_refused():
    remote = {"entrypoint": "app.py", "host": "127.0.0.1", "port": 9}
    relay = {"environment_servers": {"legacy_agent": {"entrypoint": "app.py"}}}
    made = serving_config(
        config(
            agent={"responses_api_agents": {"simple_agent": remote}},
            agent_environment_server=relay,
            policy_model={"responses_api_models": {"dummy_model": {"entrypoint": "app.py"}}},
        ),
        None,
    )

    assert sorted(made.gym.servers) == ["agent", "math"]


@pytest.mark.parametrize("port", [0, -1, 65536, "11000"])
def test_a_registry_port_that_is_no_port_is_refused(port):
    with pytest.raises(ConfigError, match="registry_port="):
        serving_config(config(), port)


def test_a_model_server_of_nemo_gyms_is_refused_where_there_is_no_nemo_gym(monkeypatch):
    monkeypatch.delenv("GYMRL_GYM_PYTHON", raising=False)
    with pytest.raises(
        ConfigError, match=r"model_type='vllm_model' is a model server of NeMo Gym.s"
    ):
        with serve_benchmark("chain_sum", "vllm_model", POLICY):
            pass


def test_an_unknown_benchmark_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="Did you mean 'chain_sum'"):
        with serve_benchmark("chain_sun", overrides=POLICY):
            pass


def test_dotted_overrides_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"'policy\.url' has a dot"):
        with serve_benchmark("chain_sum", overrides={"policy.url": "x"}):
            pass


def test_a_served_benchmark_is_entered_once():
    served = serve_benchmark("chain_sun", overrides=POLICY)
    with pytest.raises(ConfigError):
        served.__enter__()
    with pytest.raises(RuntimeError, match="entered already"):
        served.__enter__()


def test_the_servers_of_a_benchmark_can_be_had_without_a_policy():
    servers = planned_servers("chain_sum", {"answer_extractor": "first_word"}).servers

    assert sorted(servers) == ["chain_sum", "chain_sum_simple_agent"]
    assert servers["chain_sum"] == {
        "resources_servers": {
            "reasoning_gym": {
                "entrypoint": "gymrl.gym.embedded.reasoning_gym:ReasoningGymServer",
                "answer_extractor": "first_word",
            }
        }
    }


def test_a_key_in_the_policys_address_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="policy_base_url holds") as caught:
        serving_config(config(policy_base_url="https://me:sk-1234@policy/v1"), None)
    assert "sk-1234" not in str(caught.value)
