"""Benchmarks of NeMo Gym's own servers, from Python: planned, served side by side, run, killed."""

import contextlib
import json
import re
import signal
import sys
from pathlib import Path

import anyio
import psutil
import pytest
import pytest_asyncio
from anyio.streams.buffered import BufferedByteReceiveStream

import gymrl
from gymrl.actors import spawn
from gymrl.config import GenerationConfig
from gymrl.errors import ConfigError, RolloutInfraFailure, ServerDiedError
from gymrl.generation.service import GenerationService
from gymrl.gym.client import HttpPool
from gymrl.testing import build_tiny_model
from gymrl.testing.model_server import ScriptedModelServer

pytestmark = [
    pytest.mark.nemo_gym,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

NAME = "example_single_tool_call"
KEY = "a key of the policy's"


@pytest.fixture(scope="module")
def planned(root, gym_python):
    return gymrl.plan_benchmark("weather", roots=[root], gym_python=gym_python)


@pytest.fixture(scope="module")
def episodes(root, gym_python):
    return gymrl.plan_benchmark("weather/episodes", roots=[root], gym_python=gym_python)


def policy(base_url, **further):
    given = {"policy_base_url": base_url, "policy_api_key": KEY, "policy_model_name": "policy"}
    return given | {"server_spinup_timeout_seconds": 200} | further


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(root, gym_python, forecaster, tmp_path_factory):
    """Two benchmarks at once: one with a scripted policy, one with a real model of ours.

    The second has Gym's model server, before an endpoint that speaks Chat Completions.
    """
    logs = tmp_path_factory.mktemp("work")
    model = tmp_path_factory.mktemp("model")
    build_tiny_model(model)
    common = {"roots": [root], "gym_python": gym_python}
    async with contextlib.AsyncExitStack() as stack:
        scripted = await stack.enter_async_context(ScriptedModelServer(forecaster))
        generation = spawn(GenerationService, config=GenerationConfig(model=str(model)))
        endpoint = await (await stack.enter_async_context(generation)).call("start")
        first = gymrl.serve_benchmark(
            "weather", overrides=policy(scripted.base_url), work_dir=logs, **common
        )
        second = gymrl.serve_benchmark(
            "weather/episodes", "vllm_model", policy(endpoint.base_url), **common
        )
        addresses = {}

        async def enter(name, context):
            addresses[name] = await stack.enter_async_context(context)

        await enter("weather", first)
        await enter("weather/episodes", second)
        yield addresses, logs


async def test_a_benchmark_is_planned_with_data_that_gym_prepared(planned):
    assert planned.task_ids() == ["w0", "w1"]
    assert planned.plan.gym.version == "0.7.0"
    assert [row["task_id"] for row in planned.rows] == ["w0", "w0", "w1", "w1"]
    assert planned.rows[0]["task_source"] == "weather_agent"
    assert planned.rows[0]["responses_create_params"]["input"][0]["content"].startswith("what's")
    assert "nemo_gym" not in sys.modules


async def test_a_taskset_with_a_route_gives_materialized_rows_and_the_same_digests(
    planned, episodes
):
    assert [row["task_id"] for row in episodes.rows] == [
        {"taskset": "weather:today", "task_id": "w0"},
        {"taskset": "weather:today", "task_id": "w1"},
    ]
    assert set(episodes.rows[0]) == {"task_id", "task_input"}
    assert episodes.task_digests() == planned.task_digests()
    assert gymrl.PlannedBenchmark.from_json(episodes.to_json()) == episodes


async def test_a_benchmark_that_gym_ships_is_found_and_prepared_there(gym_python):
    with pytest.raises(ConfigError, match="'aegis_v4_safety': 5 of 5 tasks have no task id"):
        gymrl.plan_benchmark("aegis_v4_safety", gym_python=gym_python)
    overrides = {"task_ids_from": "sample_id"}
    planned = gymrl.plan_benchmark("aegis_v4_safety", overrides=overrides, gym_python=gym_python)
    assert len(planned.task_ids()) == 5
    assert "benign-city" in planned.task_ids()


async def test_a_real_agent_and_environment_reward_a_task(served, planned):
    addresses, _ = served
    runner = gymrl.TaskRunner(planned.rows, addresses["weather"])
    result = await runner.run_task("w1", num_repeats=3)
    assert result.rewards == [1.0, 1.0, 1.0]
    kinds = [item["type"] for item in result.results[0]["response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "message"]
    await runner.health_check()


async def test_an_environment_server_of_gyms_runs_an_episode_with_a_real_model(served, episodes):
    addresses, _ = served
    runner = gymrl.TaskRunner(episodes.rows, addresses["weather/episodes"])
    result = await runner.run_task("w0", num_repeats=2, rollout_id="eval-7")
    assert result.rewards == [0.0, 0.0]  # noise calls no tool
    for answer in result.results:
        assert answer["response"]["usage"]["output_tokens"] in range(1, 9)
    await runner.health_check()


async def test_servers_have_logs_and_the_registry_gives_no_key_away(served):
    addresses, logs = served
    names = sorted(file.name for file in (logs / "logs").iterdir())
    assert names == [f"{NAME}.log", "weather_agent.log"]
    assert "Uvicorn running on" in (logs / "logs" / "weather_agent.log").read_text()
    for registry in addresses.values():
        async with HttpPool() as pool:
            answer = await pool.get(f"{registry.url}/global_config_dict_yaml")
        published = json.loads(answer.body)
        assert NAME in published
        assert KEY not in published


async def test_nobody_has_started_ray_or_loaded_it(served, peers_processes, rays_processes):
    servers = peers_processes()
    assert len(servers) == 6
    for process in servers:
        assert not [mapped.path for mapped in process.memory_maps() if "/ray/" in mapped.path]
    assert rays_processes() == []


async def test_a_server_that_dies_is_named_to_who_waits_for_it(served, planned, peers_processes):
    addresses, _ = served
    runner = gymrl.TaskRunner(planned.rows, addresses["weather"])
    [environment] = [
        process
        for process in peers_processes()
        if process.environ()["NEMO_GYM_CONFIG_PATH"] == NAME
        and f"port: {addresses['weather'].port}\n" in process.environ()["NEMO_GYM_CONFIG_DICT"]
    ]
    environment.kill()
    with anyio.fail_after(60), pytest.raises(RolloutInfraFailure, match=f"'{NAME}' was killed by"):
        await runner.run_task("w0")
    with pytest.raises(ServerDiedError, match=f"'{NAME}' was killed by SIGKILL"):
        await runner.health_check()


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "nemo-gym.md"


def guides_example(base_url, gym_python, root):
    """The guide's first example with the addresses of here; it waits at the end of its block."""
    example = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL).group(1)
    for theirs, ours in (
        ("http://127.0.0.1:8000/v1", base_url),
        (".venv-nemo-gym/bin/python", gym_python),
        ("my_environments", str(root)),
    ):
        assert theirs in example
        example = example.replace(theirs, ours)
    *lines, last = example.splitlines()
    assert last.startswith("print(result.task_id, result.rewards)")
    return "\n".join(
        [*lines, "    print(result.task_id, result.rewards, flush=True)", "    input()"]
    )


async def test_the_guides_script_rewards_a_task_and_leaves_nothing_when_it_is_killed(
    root, gym_python, peers_processes, forecaster, tmp_path
):
    file = tmp_path / "script.py"
    async with ScriptedModelServer(forecaster) as model:
        file.write_text(guides_example(model.base_url, gym_python, root))
        command = [sys.executable, str(file)]
        async with await anyio.open_process(command, stderr=None) as script:
            printed = await BufferedByteReceiveStream(script.stdout).receive_until(b"\n", 1000)
            assert printed == b"w0 [1.0, 1.0, 1.0, 1.0]"
            servers = peers_processes(script.pid)
            family = psutil.Process(script.pid).children(recursive=True)
            assert len(servers) == 2
            script.send_signal(signal.SIGKILL)
            gone, alive = await anyio.to_thread.run_sync(
                lambda: psutil.wait_procs(family, timeout=60)
            )
            assert not alive
            assert set(servers) <= set(gone)


async def test_a_server_that_needs_ray_is_refused_by_name_before_anything_is_waited_for(
    root, gym_python, peers_processes
):
    before = len(peers_processes())
    code_gen = ["resources_servers/code_gen/configs/code_gen.yaml"]
    overrides = policy("http://127.0.0.1:9/v1", config_paths=code_gen)
    refused = gymrl.serve_benchmark(
        "weather", overrides=overrides, roots=[root], gym_python=gym_python
    )
    with pytest.raises(ConfigError, match=r"gymrl starts no Ray.*code_gen"):
        async with refused:
            pass
    assert len(peers_processes()) == before


async def test_a_model_type_that_gym_does_not_have_is_refused_with_those_that_it_has(
    root, gym_python
):
    served = gymrl.serve_benchmark(
        "weather", "vlm_model", policy("http://127.0.0.1:9/v1"), roots=[root], gym_python=gym_python
    )
    with pytest.raises(ConfigError, match=r"model_type='vlm_model'.*Did you mean 'vllm_model'"):
        async with served:
            pass


async def test_an_interpreter_without_gym_is_refused(root):
    served = gymrl.serve_benchmark(
        "weather", overrides=policy("http://x/v1"), roots=[root], gym_python=sys.executable
    )
    with pytest.raises(ConfigError, match="has no NeMo Gym"):
        async with served:
            pass
