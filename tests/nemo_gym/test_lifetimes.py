"""Real servers begin and end with their worker, and say what became of them."""

import signal
import subprocess
import sys

import anyio
import msgspec
import psutil
import pytest

from gymrl.actors import spawn
from gymrl.config import GymConfig
from gymrl.errors import ConfigError, ServerDiedError, ServerStartError
from gymrl.gym.service import GymService
from gymrl.testing.model_server import ModelCall, ScriptedModelServer
from gymrl.types import Failure

pytestmark = [pytest.mark.nemo_gym, pytest.mark.timeout(240)]

NAME = "example_single_tool_call"
OUR_AGENT = {
    "responses_api_agents": {
        "simple_agent": {"entrypoint": "gymrl.gym.embedded.simple_agent:SimpleAgent"}
    }
}
SERVERS = {
    "config_paths": [f"resources_servers/{NAME}/configs/{NAME}.yaml"],
    f"{NAME}_simple_agent": OUR_AGENT,
}


def gym_config(gym_python, servers=SERVERS, **settings):
    return GymConfig(servers=servers, gym_python=gym_python, spinup_timeout_s=200.0, **settings)


async def until_gone(processes):
    gone, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(processes, timeout=60))
    assert len(gone) == len(processes), alive


async def test_a_server_that_is_killed_mid_run_is_named_and_ends_its_rows(
    gym_python, peers_processes, make_row
):
    asked = [anyio.Event(), anyio.Event()]
    unasked = iter(asked)

    def never(_):
        next(unasked).set()
        return ModelCall(text="late", delay_s=100.0)

    async with ScriptedModelServer(never) as policy:
        async with spawn(GymService, config=gym_config(gym_python)) as gym:
            await gym.call("spin_up", [policy.base_url], "policy")
            [server] = peers_processes()
            outcomes = []
            async with anyio.create_task_group() as group:

                async def roll_out():
                    rows = [make_row(0), make_row(1)]
                    outcomes.extend([r.outcome async for r in gym.stream("run_rollouts", rows)])

                group.start_soon(roll_out)
                for event in asked:
                    await event.wait()
                server.send_signal(signal.SIGKILL)
            assert len(outcomes) == 2
            for outcome in outcomes:
                assert isinstance(outcome, Failure)
                assert outcome.kind == "infra"
                assert f"server '{NAME}' was killed by SIGKILL" in outcome.message
                assert "Uvicorn running on" in outcome.message  # its last lines
            with pytest.raises(ServerDiedError, match=f"'{NAME}' was killed by SIGKILL") as caught:
                await gym.call("health_check")
            assert caught.value.exit_code == -9
    assert peers_processes() == []


async def test_a_policy_that_is_gone_fails_a_real_agents_row_instead_of_hanging_it(
    gym_python, peers_processes, make_row
):
    servers = {"config_paths": SERVERS["config_paths"]}
    async with spawn(GymService, config=gym_config(gym_python, servers)) as gym:
        async with ScriptedModelServer([ModelCall(text="hi")]) as policy:
            await gym.call("spin_up", [policy.base_url], "policy")
            assert len(peers_processes()) == 2
        with anyio.fail_after(60):
            [result] = [result async for result in gym.stream("run_rollouts", [make_row(0)])]
    assert isinstance(result.outcome, Failure)
    assert result.outcome.kind == "infra"
    assert f"{policy.base_url}/responses" in result.outcome.message
    assert peers_processes() == []


async def test_servers_end_with_a_worker_that_is_killed(gym_python, peers_processes):
    async with ScriptedModelServer([ModelCall(text="hi")]) as policy:
        async with spawn(GymService, config=gym_config(gym_python)) as gym:
            await gym.call("spin_up", [policy.base_url], "policy")
            servers = peers_processes()
            assert len(servers) == 1
            servers[0].parent().send_signal(signal.SIGKILL)
            await until_gone(servers)


DRIVER = """
import sys
import anyio
from gymrl.actors import spawn
from gymrl.gym.service import GymService
from gymrl.testing.model_server import ModelCall, ScriptedModelServer
from gymrl.config import GymConfig
import json

async def main():
    async with ScriptedModelServer([ModelCall(text="hi")]) as policy:
        config = GymConfig.from_dict(json.loads(sys.argv[1]))
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [policy.base_url], "policy")
            sys.stdout.write("up\\n")
            sys.stdout.flush()
            await anyio.sleep_forever()

anyio.run(main)
"""


async def test_servers_end_with_a_driver_that_is_killed_and_is_the_worker_itself(
    gym_python, peers_processes
):
    config = msgspec.json.encode(gym_config(gym_python)).decode()
    command = [sys.executable, "-c", DRIVER, config]
    async with await anyio.open_process(command, stderr=subprocess.DEVNULL) as driver:
        assert await driver.stdout.receive() == b"up\n"
        servers = peers_processes(driver.pid)
        assert len(servers) == 1
        driver.kill()
        await until_gone(servers)


async def test_a_server_that_fails_while_it_starts_is_named_with_what_it_said(
    gym_python, peers_processes
):
    servers = {
        "config_paths": ["resources_servers/equivalence_rule/configs/lc.yaml"],
        "lc_equivalence_rule": {
            "resources_servers": {"equivalence_rule": {"grading_rule": "by the moon"}}
        },
        "lc_equivalence_rule_simple_agent": OUR_AGENT,
    }
    async with spawn(GymService, in_process=True, config=gym_config(gym_python, servers)) as gym:
        with pytest.raises(ServerStartError) as caught:
            await gym.call("spin_up", ["http://127.0.0.1:9/v1"], "policy")
    assert caught.value.instance == "lc_equivalence_rule"
    assert "'lc_equivalence_rule' ended with exit code 1" in caught.value.message
    assert "by the moon" in caught.value.message
    assert peers_processes() == []


async def test_servers_that_need_ray_are_refused_by_name_before_anything_starts(
    gym_python, peers_processes
):
    servers = {
        "config_paths": [
            *SERVERS["config_paths"],
            "resources_servers/code_gen/configs/code_gen.yaml",
        ]
    }
    async with spawn(GymService, in_process=True, config=gym_config(gym_python, servers)) as gym:
        with pytest.raises(ConfigError, match="gymrl starts no Ray") as caught:
            await gym.call("spin_up", ["http://127.0.0.1:9/v1"], "policy")
    assert "code_gen" in caught.value.message
    assert NAME not in caught.value.message
    assert peers_processes() == []


async def test_what_gym_refuses_is_told_in_gyms_words(gym_python):
    servers = {"config_paths": ["resources_servers/nowhere/configs/nowhere.yaml"]}
    async with spawn(GymService, in_process=True, config=gym_config(gym_python, servers)) as gym:
        with pytest.raises(ConfigError, match=r"NeMo Gym refuses .*nowhere"):
            await gym.call("spin_up", ["http://127.0.0.1:9/v1"], "policy")


async def test_what_gym_only_prints_about_a_configuration_is_told_too(gym_python):
    no_domain = {"resources_servers": {"equivalence_rule": {"entrypoint": "app.py"}}}
    servers = {"config_paths": SERVERS["config_paths"], "vague": no_domain}
    async with spawn(GymService, in_process=True, config=gym_config(gym_python, servers)) as gym:
        with pytest.raises(ConfigError, match=r"(?s)It wrote:.*'vague'.*domain"):
            await gym.call("spin_up", ["http://127.0.0.1:9/v1"], "policy")
