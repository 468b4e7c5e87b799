"""The Gym worker in a process of its own."""

import pytest

from gymrl.actors import spawn
from gymrl.config import GymConfig
from gymrl.errors import ConfigError
from gymrl.gym.service import GymEndpoint, GymService
from gymrl.testing.gym_server import FakeGymServer, Fault, gym_answer
from gymrl.testing.model_server import ModelCall, ScriptedModelServer
from gymrl.types import Failure, Trajectory

SERVERS = {
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
                "max_steps": 3,
            }
        }
    },
}


async def test_rows_come_back_from_a_worker_process_with_their_tokens(make_row):
    script = [ModelCall(tool_calls=(("lookup", '{"name": "a"}'),)), ModelCall(text="2")]
    async with ScriptedModelServer(script) as model:
        async with spawn(GymService, config=GymConfig(servers=SERVERS)) as gym:
            endpoint = await gym.call("spin_up", [model.base_url], "policy")
            assert isinstance(endpoint, GymEndpoint)
            assert endpoint.routes == ("arith", "arith_agent")
            await gym.call("health_check")
            row = make_row(0, "arith", table={"a": 2}, expected_answer=2)
            [result] = [r async for r in gym.stream("run_rollouts", [row])]
            await gym.call("shutdown")
    assert isinstance(result.outcome, Trajectory), result.outcome
    assert result.outcome.reward.verifier == 1.0
    assert len(result.outcome.turns) == 2
    assert bytes(result.outcome.token_ids.tolist()).decode().endswith("22")


async def test_failures_cross_the_process_boundary_with_status_and_url(make_row):
    """NVIDIA-NeMo/Gym#1788: a 5xx stays a 5xx on the driver's side."""
    script = {0: Fault.HTTP_503_RETRY_AFTER, 1: gym_answer([([1], [9]), ([1, 2], [3])])}
    async with FakeGymServer(script) as server:
        async with spawn(GymService, config=GymConfig(registry_url=server.url)) as gym:
            await gym.call("spin_up", [], "policy")
            rows = [make_row(index) for index in range(3)]
            results = [r async for r in gym.stream("run_rollouts", rows)]
        url = f"{server.url}/run"
    outcomes = {result.index: result.outcome for result in results}
    assert isinstance(outcomes[0], Failure)
    assert (outcomes[0].kind, outcomes[0].status, outcomes[0].url) == ("infra", 503, url)
    assert outcomes[0].fields["retry_after_s"] == 2.0
    assert outcomes[1].error == "NonContiguousTokensError"
    assert outcomes[1].fields["position"] == 1
    assert isinstance(outcomes[2], Trajectory)


async def test_leaving_the_stream_of_a_worker_process_early_frees_the_servers(make_row):
    """THUDM/slime#2078: nothing stays under way."""
    import anyio

    script = {0: gym_answer([([1], [2])]), **dict.fromkeys(range(1, 10), Fault.SILENT)}
    async with FakeGymServer(script) as server:
        async with spawn(GymService, config=GymConfig(registry_url=server.url)) as gym:
            await gym.call("spin_up", [], "policy")
            stream = gym.stream("run_rollouts", [make_row(index) for index in range(10)])
            assert (await anext(aiter(stream))).index == 0
            with anyio.fail_after(40):
                await server.wait_for_requests(10)
            await stream.aclose()
            with anyio.fail_after(30):
                await server.wait_until_idle()
            assert server.disconnects == 9


async def test_a_wrong_configuration_comes_back_as_itself():
    servers = {"x": {"resources_servers": {"x": {"entrypoint": "gymrl.nowhere:Server"}}}}
    async with spawn(GymService, config=GymConfig(servers=servers)) as gym:
        with pytest.raises(ConfigError, match=r"'x'.*cannot be imported"):
            await gym.call("spin_up", [], "policy")


async def test_a_large_answer_crosses_the_process_boundary(make_row):
    tokens = list(range(100_000))
    script = {0: gym_answer([([1], tokens)], image="x" * (8 << 20))}
    async with FakeGymServer(script) as server:
        async with spawn(GymService, config=GymConfig(registry_url=server.url)) as gym:
            await gym.call("spin_up", [], "policy")
            [result] = [r async for r in gym.stream("run_rollouts", [make_row(0)])]
    assert result.outcome.token_ids[1:].tolist() == tokens
    assert len(result.outcome.result) > 8 << 20
