"""Policy servers that want a key: the worker's relay sends it, and nobody else knows it."""

import json
import os

import anyio
import pytest

from gymrl.actors import spawn
from gymrl.benchmark import load_benchmark
from gymrl.config import GenerationConfig, GymConfig, RolloutConfig
from gymrl.errors import ActorStartError, ConfigError
from gymrl.gym.client import HttpPool
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.policy_key import KeyedPool
from gymrl.gym.policy_relay import PolicyRelay
from gymrl.gym.real_processes import environment
from gymrl.gym.service import GymService
from gymrl.records import config_digest
from gymrl.rollout.engine import RolloutEngine

TASKS = load_benchmark("chain_sum", num_tasks=3, seed=0)


def gym_config(policies, **settings):
    urls = tuple(policy.base_url for policy in policies)
    return GymConfig(servers=TASKS.servers, base_urls=urls, spinup_timeout_s=50, **settings)


async def test_rows_reach_keyed_servers_in_turns_and_the_key_is_on_no_record(
    keyed_policies, variable
):
    config = RolloutConfig(gym=gym_config(keyed_policies, api_key_env=variable), in_process=True)
    async with RolloutEngine(config) as engine:
        groups = await engine.run(TASKS.rows, num_generations=2)
    assert [len(group.trajectories) for group in groups] == [2, 2, 2]
    key = keyed_policies[0].key
    for policy in keyed_policies:
        assert len(policy.bodies) == 3
        assert set(policy.headers) == {f"Bearer {key}"}
    assert key not in repr(groups)
    assert key not in repr(config)


async def test_the_registry_gives_out_the_relays_address_and_no_key(keyed_policies, variable):
    config = gym_config(keyed_policies, api_key_env=variable)
    async with spawn(GymService, in_process=True, config=config) as gym, HttpPool() as pool:
        endpoint = await gym.call("spin_up", [p.base_url for p in keyed_policies], "policy")
        answer = await pool.get(f"{endpoint.registry_url}/global_config_dict_yaml")
        instances = await pool.get(f"{endpoint.registry_url}/server_instances")
    published = json.loads(answer.body)
    assert "chain_sum_simple_agent" in published
    assert keyed_policies[0].key not in published + instances.body.decode()
    assert not any(policy.base_url in published for policy in keyed_policies)


async def test_a_server_that_misses_its_key_is_told_at_once(keyed_policies):
    engine = RolloutEngine(RolloutConfig(gym=gym_config(keyed_policies), in_process=True))
    with anyio.fail_after(30), pytest.raises(ConfigError, match=r"HTTP 401.*set gym\.api_key_env"):
        await engine.__aenter__()


async def test_a_wrong_key_is_told_at_once_and_is_not_repeated(keyed_policies, wrong_variable):
    gym = gym_config(keyed_policies, api_key_env=wrong_variable)
    engine = RolloutEngine(RolloutConfig(gym=gym, in_process=True))
    with anyio.fail_after(30), pytest.raises(ConfigError) as caught:
        await engine.__aenter__()
    told = caught.value.message
    assert f"the key in {wrong_variable} (gym.api_key_env) is not one it takes" in told
    assert "not a key of mine: Bearer (the key)" in told
    assert keyed_policies[0].wrong_key not in told
    assert all(len(policy.headers) <= 1 for policy in keyed_policies)


@pytest.mark.parametrize(
    ("value", "said"), [(" \n", "not set, or empty"), ("sk\r\nX: 1", "not shown here")]
)
async def test_a_variable_without_a_key_is_told_before_anything_starts(variable, value, said):
    os.environ[variable] = value
    config = GymConfig(servers=TASKS.servers, api_key_env=variable)
    told = rf"gym\.api_key_env {variable}: .*{said}"
    with pytest.raises(ActorStartError, match=told) as caught:
        async with spawn(GymService, in_process=True, config=config):
            pass
    assert "X: 1" not in caught.value.message


async def test_a_rollout_without_cookies_stays_at_one_server(keyed_policies, variable):
    async with KeyedPool(os.environ[variable].strip()) as keyed, HttpPool() as pool:
        roots = [policy.base_url.removesuffix("/v1") for policy in keyed_policies]
        relay = Listener(PolicyRelay(keyed, roots, "policy").application(), PortRange())
        await relay.start()
        for rollout in ("a", "b", "c", "d") * 2:
            await pool.post(f"{relay.url}/ng-rollout/{rollout}/v1/responses", b"{}")
        await relay.stop()
    # The prefix is no path of theirs, but says who was asked.
    paths = [policy.paths for policy in keyed_policies]
    assert sorted(map(len, map(set, paths)), reverse=True)[0] < 4
    for path in paths[0] + paths[1]:
        assert (paths[0].count(path), paths[1].count(path)) in ((2, 0), (0, 2))


def test_processes_of_others_do_not_inherit_the_key(variable):
    key = os.environ[variable].strip()
    given = environment(GymConfig(api_key_env=variable))
    assert variable not in given
    assert not [value for value in given.values() if key in value]
    assert environment(GymConfig())[variable].strip() == key


def test_a_key_in_place_of_its_variables_name_is_refused_without_showing_it():
    with pytest.raises(ConfigError, match="name of an environment variable") as caught:
        GymConfig(api_key_env="sk-pasted-here")
    assert "pasted" not in caught.value.message


def test_a_key_is_for_servers_that_are_named():
    with pytest.raises(ConfigError, match=r"gym\.api_key_env.*vllm\.api_key_env"):
        RolloutConfig(
            generation=GenerationConfig(model="smollm2"), gym=GymConfig(api_key_env="SOME_KEY")
        )


def test_where_the_key_lies_does_not_decide_what_a_run_gives():
    urls = ("http://h/v1",)
    with_key = RolloutConfig(gym=GymConfig(base_urls=urls, api_key_env="SOME_KEY"))
    assert config_digest(with_key) == config_digest(RolloutConfig(gym=GymConfig(base_urls=urls)))
