import pytest

from gymrl.errors import ConfigError, RowValueError
from gymrl.gym.publication import (
    instance_rows,
    published_config,
    split_address,
    without_secrets,
)
from gymrl.gym.registry import RouteTable, read_instances


def agent(resources, port=10, **block):
    block = {"resources_server": {"name": resources}, "host": "127.0.0.1", "port": port, **block}
    return {"responses_api_agents": {"simple_agent": block}}


def resources(port=20):
    return {"resources_servers": {"r": {"host": "127.0.0.1", "port": port}}}


def front(agent_name, port, impl="single_agent_turn"):
    block = {"agent_server": {"name": agent_name}, "host": "127.0.0.1", "port": port}
    return {"environment_servers": {impl: block}}


MODEL = {"responses_api_models": {"vllm_model": {"host": "127.0.0.1", "port": 30}}}
CONFIG = {
    "env": resources(),
    "env_agent": agent("env"),
    "shared": resources(),
    "one": agent("shared", 11),
    "two": agent("shared", 12),
    "lonely": resources(),
    "policy_model": MODEL,
    "policy_base_url": "http://x",
    "head_server": {"host": "127.0.0.1", "port": 1},
}


def test_agents_and_task_sources_are_routes_sorted_by_name():
    assert RouteTable(CONFIG).routes == ("env", "env_agent", "one", "two")


def test_a_task_source_stands_for_the_one_agent_in_front_of_it():
    table = RouteTable(CONFIG)
    assert table.agent_of("env") == "env_agent"
    assert table.run_url("env") == table.run_url("env_agent") == "http://127.0.0.1:10/run"


@pytest.mark.parametrize(
    ("route", "text"),
    [
        ("nope", "'nope' to an agent: not in the running config"),
        ("policy_model", "instance is not an agent or resources server"),
        ("shared", r"several agents use it \(one, two\); name one in the row's agent_ref"),
        ("lonely", "no agent uses this resources server"),
    ],
)
def test_a_route_that_leads_nowhere_lists_the_known_ones(route, text):
    with pytest.raises(RowValueError, match=text) as caught:
        RouteTable(CONFIG).run_url(route)
    assert str(caught.value).endswith("Known routes: env, env_agent, one, two")


def test_a_relay_in_front_of_an_agent_is_passed_by():
    config = CONFIG | {"relay": front("env_agent", 40, impl="legacy_agent")}
    table = RouteTable(config)
    assert table.run_url("env") == "http://127.0.0.1:10/run"
    assert "env_agent" in table.servers
    assert not {"relay", "policy_model"} & set(table.servers)


def test_two_environment_servers_in_front_of_one_agent_are_ambiguous():
    config = CONFIG | {"a": front("env_agent", 40), "b": front("env_agent", 41)}
    with pytest.raises(RowValueError, match="behind several environment servers"):
        RouteTable(config).run_url("env")


@pytest.mark.parametrize("port", [None, -1, "80", True, 70000])
def test_an_instance_without_a_port_is_named(port):
    with pytest.raises(ConfigError, match="instance 'a' has no port"):
        RouteTable({"a": agent("env", port)}).run_url("a")


def test_a_server_on_all_interfaces_is_asked_where_its_registry_was():
    table = RouteTable({"a": agent("env", host="0.0.0.0")}, default_host="node7")
    assert table.run_url("a") == "http://node7:10/run"


def test_what_is_no_instance_is_left_out():
    assert set(read_instances(CONFIG)) == set(CONFIG) - {"policy_base_url", "head_server"}


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000/v1", ("127.0.0.1", 8000)),
        ("http://[::1]:8000", ("::1", 8000)),
        ("https://host/v1", ("host", 443)),
        ("http://host", ("host", 80)),
    ],
)
def test_addresses_are_read_from_urls(url, address):
    assert split_address(url) == address


def test_a_published_configuration_lets_gyms_own_clients_reach_an_agent():
    """Gym 0.7 collects through environment servers only."""
    servers = {
        "env": {"resources_servers": {"r": {"entrypoint": "a:B"}}},
        "env_agent": {
            "responses_api_agents": {"simple_agent": {"resources_server": {"name": "env"}}}
        },
    }
    addresses = {
        "env": "http://127.0.0.1:20",
        "env_agent": "http://127.0.0.1:10",
        "head_server": "http://127.0.0.1:1",
    }
    config = published_config(servers, addresses, ["http://h:9/v1"], "m")
    assert config["env_agent_environment_server"] == {
        "environment_servers": {
            "legacy_agent": {
                "entrypoint": "external",
                "agent_server": {"type": "responses_api_agents", "name": "env_agent"},
                "host": "127.0.0.1",
                "port": 10,
            }
        }
    }
    assert config["head_server"] == {"host": "127.0.0.1", "port": 1}
    assert (config["policy_base_url"], config["policy_model_name"]) == (["http://h:9/v1"], "m")
    assert RouteTable(config).run_url("env") == "http://127.0.0.1:10/run"
    rows = {row["process_name"]: row["url"] for row in instance_rows(config)}
    assert rows == {
        "env": "http://127.0.0.1:20",
        "env_agent": "http://127.0.0.1:10",
        "policy_model": "http://h:9",
    }
    assert "host" not in servers["env"]["resources_servers"]["r"]


def test_what_the_registry_tells_holds_no_secrets():
    config = {
        "judge": {"responses_api_models": {"m": {"api_key": "k", "base_url": "u", "ok": [1]}}},
        "policy_api_key": "k",
        "hf_token": "t",
        "max_output_tokens": 3,
        "headers": [{"Authorization": "Bearer x", "Accept": "y"}],
    }
    assert without_secrets(config) == {
        "judge": {"responses_api_models": {"m": {"base_url": "u", "ok": [1]}}},
        "max_output_tokens": 3,
        "headers": [{"Accept": "y"}],
    }


def test_what_is_no_url_is_refused_by_name():
    with pytest.raises(ConfigError, match="'localhost:80' is no URL"):
        split_address("localhost:80")
