import asyncio
import json
import logging
import threading

import anyio
import pytest

from gymrl.actors import spawn
from gymrl.config import GymConfig
from gymrl.errors import (
    ConfigError,
    GymTransportError,
    ServerDiedError,
    ServerError,
    ServerStartError,
)
from gymrl.gym.client import GymClient, HttpPool
from gymrl.gym.embedded.tool_arithmetic import ToolArithmeticServer
from gymrl.gym.episode import EpisodeOptions
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.registry import RegistryServer, read_registry
from gymrl.gym.rollouts import RowServer, stream_rows
from gymrl.gym.servers import ServerSet
from gymrl.gym.service import GymService
from gymrl.testing.gym_server import FakeGymServer, Fault, gym_answer
from gymrl.testing.model_server import ModelCall, ScriptedModelServer
from gymrl.types import Failure, Trajectory
from tests.integration.actors.watching import until

ARITHMETIC = {
    "arith": {
        "resources_servers": {
            "arith": {"entrypoint": "gymrl.gym.embedded.tool_arithmetic:ToolArithmeticServer"}
        }
    },
    "arith_agent": {
        "responses_api_agents": {
            "simple_agent": {
                "entrypoint": "gymrl.gym.embedded.simple_agent:SimpleAgent",
                "resources_server": {"name": "arith"},
                "model_server": {"name": "policy_model"},
            }
        }
    },
}


async def test_512_rows_are_under_way_at_once(make_row):
    """NVIDIA-NeMo/RL#3590: a connection limit of 100 would hang here."""
    rows = [make_row(index) for index in range(512)]
    async with FakeGymServer(barrier=512) as server:
        config = GymConfig(registry_url=server.url)
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [], "policy")
            results = [result async for result in gym.stream("run_rollouts", rows)]
        assert server.most_in_flight == 512
    assert sorted(result.index for result in results) == list(range(512))
    assert all(isinstance(result.outcome, Trajectory) for result in results)


async def test_the_last_row_of_a_call_carries_the_timings(make_row):
    async with FakeGymServer() as server:
        config = GymConfig(registry_url=server.url)
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [], "policy")
            rows = [make_row(index) for index in range(5)]
            results = [r async for r in gym.stream("run_rollouts", rows, "timing/train")]
    assert [result.timings for result in results[:-1]] == [None] * 4
    timings = results[-1].timings
    assert set(timings) == {
        f"timing/train/{name}"
        for name in (
            "total",
            "run_rollouts",
            "await_results",
            "postprocess_results",
            "postprocess_results_pct",
            "wait_for_connection",
        )
    }
    assert 0 < timings["timing/train/postprocess_results"] < timings["timing/train/total"]
    assert 0 < timings["timing/train/postprocess_results_pct"] < 100


async def test_no_rows_are_no_results(make_row):
    async with FakeGymServer() as server:
        config = GymConfig(registry_url=server.url)
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [], "policy")
            assert [r async for r in gym.stream("run_rollouts", [])] == []


async def test_leaving_early_cancels_what_is_under_way_and_the_server_sees_it(make_row):
    script = {0: gym_answer([([1], [2])]), **dict.fromkeys(range(1, 30), Fault.SILENT)}
    rows = [make_row(index) for index in range(30)]
    async with FakeGymServer(script) as server:
        config = GymConfig(registry_url=server.url)
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [], "policy")
            stream = gym.stream("run_rollouts", rows)
            first = await anext(aiter(stream))
            assert first.index == 0
            await server.wait_for_requests(30)
            await stream.aclose()
            with anyio.fail_after(30):
                await server.wait_until_idle()
            assert server.disconnects == 29
            again = [r async for r in gym.stream("run_rollouts", [make_row(0)])]
            assert isinstance(again[0].outcome, Trajectory)


async def test_a_row_that_waits_for_its_turn_does_not_use_up_its_deadline(make_row):
    """A pool smaller than the demand is a queue, measured on its own."""
    rows = [make_row(index) for index in range(6)]
    body = json.dumps(gym_answer([([1], [2])])).encode()

    class SlowClient(GymClient):
        async def run(self, url, row, agent):
            await anyio.sleep(0.1)
            return body

    async with FakeGymServer() as server, HttpPool() as pool:
        table = await read_registry(pool, server.url)
        client = SlowClient(pool, 0.15)
        serving = RowServer(client, table, EpisodeOptions(), None, max_connections=1)
        results = [r async for r in stream_rows(serving, rows, "t")]
    assert all(isinstance(result.outcome, Trajectory) for result in results)
    assert results[-1].timings["t/wait_for_connection"] > 0.5


async def test_the_health_check_does_not_queue_behind_rows(make_row):
    async with FakeGymServer({0: Fault.SILENT}) as server:
        config = GymConfig(registry_url=server.url, max_connections=1)
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [], "policy")
            stream = gym.stream("run_rollouts", [make_row(0)])
            async with anyio.create_task_group() as group:
                group.start_soon(anext, aiter(stream))
                with anyio.fail_after(30):
                    await server.wait_for_requests(1)
                    with pytest.raises(ServerDiedError, match="refused_agent"):
                        await gym.call("health_check")
                group.cancel_scope.cancel()
            await stream.aclose()


async def test_large_answers_are_read_in_a_thread_and_small_ones_are_not(make_row):
    threads = {}

    def decode(spans):
        threads[len(spans[1])] = threading.get_ident()
        return [""] * len(spans)

    script = {
        0: gym_answer([([1], [2])]),
        1: gym_answer([([1], list(range(40000)))]),
    }
    async with FakeGymServer(script) as server, HttpPool() as pool:
        table = await read_registry(pool, server.url)
        serving = RowServer(GymClient(pool, 20.0), table, EpisodeOptions(), decode)
        async for result in stream_rows(serving, [make_row(0), make_row(1)], "t"):
            assert isinstance(result.outcome, Trajectory)
    assert threads[1] == threading.get_ident()
    assert threads[40000] != threading.get_ident()


async def test_embedded_servers_start_answer_and_leave_nothing(make_row):
    row = make_row(0, "arith", table={"a": 2}, expected_answer=2)
    before = asyncio.all_tasks()
    async with ScriptedModelServer([ModelCall(text="2")]) as model:
        async with spawn(GymService, in_process=True, config=GymConfig(servers=ARITHMETIC)) as gym:
            endpoint = await gym.call("spin_up", [model.base_url], "policy")
            assert endpoint.routes == ("arith", "arith_agent")
            await gym.call("health_check")
            async with HttpPool() as pool:
                table = await read_registry(pool, endpoint.registry_url)
                assert table.routes == endpoint.routes
                answer = await pool.post(table.run_url("arith"), row.body)
                assert json.loads(answer.body)["reward"] == 1.0
                instances = await pool.get(f"{endpoint.registry_url}/server_instances")
                assert {i["process_name"] for i in json.loads(instances.body)} == {
                    "arith",
                    "arith_agent",
                    "policy_model",
                }
                await gym.call("shutdown")
                await gym.call("shutdown")
                with pytest.raises(GymTransportError):
                    await pool.get(endpoint.registry_url)
                with pytest.raises(GymTransportError):
                    await pool.get(table.url_of("arith"))
    await until(lambda: not asyncio.all_tasks() - before)


async def test_shutdown_before_spin_up_and_calls_after_it_are_told_apart(make_row):
    async with spawn(GymService, in_process=True, config=GymConfig()) as gym:
        await gym.call("shutdown")
        with pytest.raises(ServerError, match="not spun up"):
            await gym.call("health_check")
        with pytest.raises(ServerError, match="not spun up"):
            async for _ in gym.stream("run_rollouts", [make_row(0)]):
                pass


async def test_a_second_spin_up_is_refused():
    async with FakeGymServer() as server:
        config = GymConfig(registry_url=server.url)
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [], "policy")
            with pytest.raises(ServerError, match="spun up already"):
                await gym.call("spin_up", [], "policy")


async def test_the_health_check_names_a_server_that_is_gone():
    """NVIDIA-NeMo/RL#2305: a dead server is named instead of showing as timeouts."""
    server = FakeGymServer(agents=("agent_of_somebody",))
    await server.start()
    config = GymConfig(registry_url=server.url)
    async with spawn(GymService, in_process=True, config=config) as gym:
        await gym.call("spin_up", [], "policy")
        with pytest.raises(ServerDiedError, match="refused_agent") as caught:
            await gym.call("health_check")
        assert caught.value.instance == "refused_agent"
        await server.stop()
        with pytest.raises(ServerDiedError):
            await gym.call("health_check")


async def test_a_server_that_is_not_ready_in_time_is_named_and_the_rest_is_stopped():
    servers = {
        **ARITHMETIC,
        "far_away": {
            "resources_servers": {
                "theirs": {"entrypoint": "app.py", "host": "127.0.0.1", "port": 1}
            }
        },
    }
    config = GymConfig(servers=servers, spinup_timeout_s=3.0)
    before = asyncio.all_tasks()
    async with ScriptedModelServer([ModelCall(text="2")]) as model:
        async with spawn(GymService, in_process=True, config=config) as gym:
            with pytest.raises(ServerStartError, match=r"within 3 s.*far_away") as caught:
                await gym.call("spin_up", [model.base_url], "policy")
            assert caught.value.instance == "far_away"
            assert "arith" not in str(caught.value).split(": ")[-1]
    await until(lambda: not asyncio.all_tasks() - before)


async def test_a_registry_that_is_still_starting_is_waited_for(make_row):
    registry = RegistryServer()
    listener = Listener(registry.application(), PortRange())
    await listener.start()

    async def publish_soon():
        await anyio.sleep(0.3)
        registry.publish({}, [])

    async with anyio.create_task_group() as group:
        group.start_soon(publish_soon)
        config = GymConfig(registry_url=listener.url)
        async with spawn(GymService, in_process=True, config=config) as gym:
            endpoint = await gym.call("spin_up", [], "policy")
    assert endpoint.registry_url == listener.url
    await listener.stop()


@pytest.mark.parametrize("started", [True, False])
async def test_a_registry_that_is_not_ready_in_time_is_named(started):
    listener = Listener(RegistryServer().application(), PortRange())
    await listener.start()
    url = listener.url
    if not started:
        await listener.stop()
    config = GymConfig(registry_url=url, spinup_timeout_s=0.3)
    async with spawn(GymService, in_process=True, config=config) as gym:
        with pytest.raises(ServerStartError, match=f"{url} was not ready within 0.3 s"):
            await gym.call("spin_up", [], "policy")
    await listener.stop()


async def test_a_policy_address_that_is_no_url_is_refused():
    async with spawn(GymService, in_process=True, config=GymConfig(servers=ARITHMETIC)) as gym:
        with pytest.raises(ConfigError, match="'localhost/v1' is no URL"):
            await gym.call("spin_up", ["localhost/v1"], "policy")


async def test_a_policy_that_does_not_answer_is_named_at_spin_up():
    config = GymConfig(servers=ARITHMETIC, spinup_timeout_s=0.5)
    async with spawn(GymService, in_process=True, config=config) as gym:
        with pytest.raises(ServerStartError, match=r"policy_model \(http://127\.0\.0\.1:1/v1\)"):
            await gym.call("spin_up", ["http://127.0.0.1:1/v1"], "policy")


def broken(**changes):
    block = ARITHMETIC["arith_agent"]["responses_api_agents"]["simple_agent"]
    agent = {"responses_api_agents": {"simple_agent": {**block, **changes}}}
    return {**ARITHMETIC, "arith_agent": agent}


@pytest.mark.parametrize(
    ("servers", "text"),
    [
        (broken(max_stepz=3), "arith_agent.*max_stepz"),
        (broken(max_steps=0), "arith_agent.*max_steps=0"),
        (broken(entrypoint="gymrl.nowhere:Agent"), "arith_agent.*cannot be imported"),
        (broken(entrypoint="gymrl.config:GymConfig"), "no embedded server class"),
        (broken(entrypoint="app.py"), "not one of ours"),
        (broken(resources_server={"name": "nope"}), "arith_agent.*resources_server.*'nope'"),
        (
            broken(entrypoint="gymrl.gym.embedded.tool_arithmetic:ToolArithmeticServer"),
            "belongs under resources_servers",
        ),
        ({"x": {"resources_servers": {"a": {}, "b": {}}}}, "one kind with one implementation"),
        (
            {"judge": {"responses_api_models": {"vllm_model": {"base_url": None}}}},
            "judge.*base_url",
        ),
    ],
)
async def test_a_wrong_server_configuration_names_instance_and_setting(servers, text):
    async with ScriptedModelServer([ModelCall(text="2")]) as model:
        config = GymConfig(servers=servers)
        async with spawn(GymService, in_process=True, config=config) as gym:
            with pytest.raises(ConfigError, match=text):
                await gym.call("spin_up", [model.base_url], "policy")


class BrokenAtStart(ToolArithmeticServer):
    async def open(self):
        raise ValueError("the data is not there")


async def test_a_server_whose_start_raises_is_named_with_the_cause():
    servers = {"broken": {"resources_servers": {"b": {"entrypoint": f"{__name__}:BrokenAtStart"}}}}
    async with spawn(GymService, in_process=True, config=GymConfig(servers=servers)) as gym:
        with pytest.raises(ServerStartError, match=r"'broken'.*ValueError: the data is not there"):
            await gym.call("spin_up", [], "policy")


async def test_agents_without_a_policy_are_told_to_get_base_urls():
    async with spawn(GymService, in_process=True, config=GymConfig(servers=ARITHMETIC)) as gym:
        with pytest.raises(ConfigError, match="give base_urls"):
            await gym.call("spin_up", [], "policy")


async def test_ports_come_from_the_range_and_an_exhausted_range_says_so(unused_tcp_port_factory):
    low = unused_tcp_port_factory()
    async with ScriptedModelServer([ModelCall(text="2")]) as model:
        config = GymConfig(servers=ARITHMETIC, port_range_low=low, port_range_high=low)
        async with spawn(GymService, in_process=True, config=config) as gym:
            with pytest.raises(ServerStartError, match=f"no port from {low} to {low} is free"):
                await gym.call("spin_up", [model.base_url], "policy")


async def test_a_call_names_the_slowest_agents_in_the_log(make_row, caplog):
    import gymrl.gym.rollouts as rollouts

    caplog.set_level(logging.INFO, logger=rollouts.__name__)
    async with FakeGymServer({1: Fault.SILENT}) as server, HttpPool() as pool:
        table = await read_registry(pool, server.url)
        serving = RowServer(GymClient(pool, 3.0), table, EpisodeOptions(), None)
        rows = [make_row(0), make_row(1)]
        stream = stream_rows(serving, rows, "t", progress_interval_s=0.1)
        outcomes = [r.outcome async for r in stream]
    assert isinstance(outcomes[1], Failure)
    assert "1 of 2 rows" in caplog.text
    assert "waiting for fake_agent: 1" in caplog.text


async def test_texts_are_decoded_by_the_tokenizer_of_the_configuration(make_row, tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {"<0>": 0, "a": 1, "b": 2, "c": 3}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")).save(str(tmp_path / "tokenizer.json"))
    async with FakeGymServer({0: gym_answer([([1], [2, 3])])}) as server:
        config = GymConfig(registry_url=server.url, tokenizer=str(tmp_path))
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [], "policy")
            [result] = [r async for r in gym.stream("run_rollouts", [make_row(0)])]
    [turn] = result.outcome.turns
    assert (turn.prompt_text, turn.generation_text) == ("a", "b c")


async def test_a_tokenizer_that_is_not_there_is_named_at_spawn(tmp_path):
    config = GymConfig(tokenizer=str(tmp_path))
    with pytest.raises(Exception, match=r"tokenizer .* cannot be loaded"):
        async with spawn(GymService, in_process=True, config=config):
            pass


async def test_a_start_tells_the_log_what_it_waits_for(caplog):
    """A deadline around the worker says who was late; the log says because of whom."""
    config = GymConfig(servers=ARITHMETIC, spinup_timeout_s=3.0)
    async with HttpPool() as pool:
        servers = ServerSet(config, tell_every_s=0.5)
        with pytest.raises(ServerStartError, match="not ready within"):
            await servers.start(pool, ["http://127.0.0.1:9/v1"], "policy")
    told = [r.getMessage() for r in caplog.records if "still waiting" in r.getMessage()]
    assert told
    assert "policy_model (http://127.0.0.1:9/v1)" in told[-1]
    assert "arith" not in told[-1]
