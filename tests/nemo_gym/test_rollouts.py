"""Ten environments side by side: real agents with ours and theirs, our agent with theirs."""

import json
import subprocess
from pathlib import Path

import anyio
import msgspec
import pytest
import pytest_asyncio

from gymrl.benchmark import load_benchmark
from gymrl.config import GymConfig, RolloutConfig
from gymrl.rollout.engine import RolloutEngine
from gymrl.testing.model_server import ModelCall, ScriptedModelServer, scripted_routes

# Thirteen real servers start in the first test; each imports all of NeMo Gym.
pytestmark = [
    pytest.mark.nemo_gym,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

OUR_AGENT = {
    "responses_api_agents": {
        "simple_agent": {"entrypoint": "gymrl.gym.embedded.simple_agent:SimpleAgent"}
    }
}
POLICY = {"type": "responses_api_models", "name": "policy_model"}
CONFIG = {
    "config_paths": [
        f"resources_servers/{name}/configs/{name}.yaml"
        for name in (
            "example_single_tool_call",
            "example_multi_step",
            "example_session_state_mgmt",
            "example_tool_call_multireward",
            "workplace_assistant",
            "reasoning_gym",
            "mcqa",
        )
    ]
    + [
        "resources_servers/equivalence_rule/configs/lc.yaml",
        "resources_servers/structured_outputs/configs/structured_outputs_json.yaml",
    ],
    # Gym's example agents, with our agent's class in their place.
    "example_multi_step_simple_agent": OUR_AGENT,
    "example_tool_call_multireward_simple_agent": OUR_AGENT,
    "reasoning_gym_simple_agent": OUR_AGENT,
    "mcqa_simple_agent": OUR_AGENT,
    "lc_equivalence_rule_simple_agent": OUR_AGENT,
    "structured_outputs_simple_agent": OUR_AGENT,
    # Our environment, behind Gym's agent.
    "arithmetic": {
        "resources_servers": {
            "tool_arithmetic": {
                "entrypoint": "gymrl.gym.embedded.tool_arithmetic:ToolArithmeticServer"
            }
        }
    },
    "arithmetic_agent": {
        "responses_api_agents": {
            "simple_agent": {
                "entrypoint": "app.py",
                "resources_server": {"type": "resources_servers", "name": "arithmetic"},
                "model_server": POLICY,
            }
        }
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def planner(planner_class):
    return planner_class()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(gym_python, planner):
    async with ScriptedModelServer(planner) as first, ScriptedModelServer(planner) as second:
        config = RolloutConfig(
            gym=GymConfig(
                servers=CONFIG,
                gym_python=gym_python,
                base_urls=(first.base_url, second.base_url),
                spinup_timeout_s=280.0,
                row_timeout_s=60.0,
            ),
            start_timeout_s=290.0,
        )
        async with RolloutEngine(config) as running:
            yield running


async def test_a_real_agent_calls_a_tool_of_a_real_environment(engine, planner, example_rows, tool):
    rows = example_rows("example_single_tool_call", count=2)
    for row in rows:
        asks = msgspec.structs.replace(tool("get_weather", city="Oslo"), has_routes=True)
        planner.plan(row, asks, ModelCall(text="It is cold.", has_routes=True))
    groups = await engine.run(rows, num_generations=4)
    assert [len(group.trajectories) for group in groups] == [4, 4]
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.agent == "example_single_tool_call_simple_agent"
        assert trajectory.reward.total == 1.0
        assert len(trajectory.turns) == 2
        # The policy's tokens are the bytes of what it says, through agent, environment and back.
        last = trajectory.turns[1]
        sampled = trajectory.token_ids[last.generation_start : last.end]
        assert b"It is cold." in bytes(sampled.astype("uint8"))
        assert (trajectory.logprobs[last.generation_start : last.end] < 0).all()
        # Gym's agent passes routes on as well.
        routes = scripted_routes(trajectory.token_ids)
        assert trajectory.routed_experts[:-1].tolist() == routes[:-1].tolist()
        assert trajectory.notes == {}


async def test_our_agent_walks_through_several_steps_of_a_real_environment(
    engine, planner, example_rows, tool
):
    [row] = example_rows("example_multi_step", route="example_multi_step_resources_server")
    lookups = [tool("get_synonym_value", synonym=word) for word in row["expected_synonyms"]]
    values = tool("extract_synonym_values", synonym_values=row["expected_synonym_values"])
    planner.plan(row, *lookups, values, ModelCall(text="done"))
    [group] = await engine.run([row], num_generations=2)
    assert [t.reward.total for t in group.trajectories] == [1.0, 1.0]
    assert [len(t.turns) for t in group.trajectories] == [4, 4]


async def test_a_real_environment_knows_a_real_agents_sessions_apart(
    engine, planner, example_rows, tool
):
    [row] = example_rows(
        "example_session_state_mgmt", route="example_session_state_mgmt_resources_server"
    )
    planner.plan(
        row,
        tool("increment_counter", count=1),
        tool("increment_counter", count=2),
        tool("get_counter_value"),
        ModelCall(text="It is 6."),
    )
    [group] = await engine.run([row], num_generations=8)
    assert [t.reward.total for t in group.trajectories] == [1.0] * 8


async def test_components_of_a_real_environment_add_up_to_its_reward(
    engine, planner, example_rows, tool
):
    right, wrong = example_rows("example_tool_call_multireward", count=2)
    call = right["expected_call"]
    planner.plan(right, tool(call["name"], **call["arguments"]), ModelCall(text="Sunny."))
    planner.plan(wrong, ModelCall(text="I would not know."))
    called, silent = await engine.run([right, wrong], num_generations=2)
    for trajectory in called.trajectories:
        assert trajectory.reward.components == {
            "correctness": 1.0,
            "schema_valid": 1.0,
            "format": 0.0,
        }
        assert trajectory.reward.total == 2.0
    assert [t.reward.total for t in silent.trajectories] == [0.0, 0.0]


async def test_a_real_agent_works_in_the_workplace(engine, planner, example_rows, tool):
    [row] = example_rows("workplace_assistant")
    calls = [tool(c["name"], **json.loads(c["arguments"])) for c in row["ground_truth"]]
    planner.plan(row, *calls, ModelCall(text="I replied to Carlos."))
    [group] = await engine.run([row], num_generations=2)
    assert [t.reward.total for t in group.trajectories] == [1.0, 1.0]


async def test_answers_are_graded_by_a_rule(engine, planner, example_rows):
    right, wrong = example_rows("equivalence_rule", count=2, route="lc_equivalence_rule")
    planner.plan(right, ModelCall(text=right["expected_answer"]))
    planner.plan(wrong, ModelCall(text="no idea"))
    groups = await engine.run([right, wrong], num_generations=2)
    rewards = [[t.reward.total for t in group.trajectories] for group in groups]
    assert rewards == [[1.0, 1.0], [0.0, 0.0]]


async def test_choices_are_graded_by_their_letter(engine, planner, example_rows):
    right, wrong = example_rows("mcqa", count=2)
    planner.plan(right, ModelCall(text=f"\\boxed{{{right['expected_answer']}}}"))
    planner.plan(wrong, ModelCall(text="All of them."))
    groups = await engine.run([right, wrong], num_generations=2)
    rewards = [[t.reward.total for t in group.trajectories] for group in groups]
    assert rewards == [[1.0, 1.0], [0.0, 0.0]]


async def test_answers_are_held_to_a_schema(engine, planner):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    rows = [
        {
            "task_source": "structured_outputs",
            "schema_str": json.dumps(schema),
            "schema_type": "json",
            "responses_create_params": {"input": [{"role": "user", "content": question}]},
        }
        for question in ("Where is the opera?", "Where is the harbour?")
    ]
    planner.plan(rows[0], ModelCall(text='{"city": "Oslo"}'))
    planner.plan(rows[1], ModelCall(text='{"town": "Oslo"}'))
    groups = await engine.run(rows, num_generations=2)
    rewards = [[t.reward.total for t in group.trajectories] for group in groups]
    assert rewards == [[1.0, 1.0], [0.0, 0.0]]


async def test_puzzles_are_scored_by_the_real_reasoning_gym(engine, planner, example_rows):
    right, wrong = example_rows("reasoning_gym", count=2)
    planner.plan(right, ModelCall(text=f"<answer>{right['answer']}</answer>"))
    planner.plan(wrong, ModelCall(text="<answer>nobody</answer>"))
    groups = await engine.run([right, wrong], num_generations=2)
    first, second = ([t.reward.total for t in group.trajectories] for group in groups)
    assert first == [1.0, 1.0]
    assert max(second) < 1.0


async def test_a_real_agent_uses_the_tools_of_our_environment(engine, planner, tool):
    row = dict(load_benchmark("tool_arithmetic", num_tasks=1, seed=0).rows[0])
    row["task_source"] = "arithmetic"
    planner.plan(row, tool("calculator", expression="2 + 2"), ModelCall(text="4"))
    [group] = await engine.run([row], num_generations=2)
    for trajectory in group.trajectories:
        assert trajectory.agent == "arithmetic_agent"
        assert len(trajectory.turns) == 2


async def test_gyms_own_collector_finds_our_registry(
    engine, planner, example_rows, tool, gym_python, tmp_path
):
    [weather] = example_rows("example_single_tool_call")
    planner.plan(weather, tool("get_weather", city="Oslo"), ModelCall(text="It is cold."))
    [graded] = example_rows("equivalence_rule", route="lc_equivalence_rule")
    planner.plan(graded, ModelCall(text=graded["expected_answer"]))
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([weather, graded]))
    worker = next(i for i in engine.fleet.instances if hasattr(i.endpoint, "registry_url"))
    port = worker.endpoint.registry_url.rpartition(":")[2]
    done = await anyio.run_process(
        [gym_python, str(Path(__file__).with_name("collect.py")), port, str(rows)],
        stderr=subprocess.PIPE,
        check=False,
        cwd=tmp_path,
    )
    lines = done.stdout.decode().splitlines()
    results = sorted(json.loads(line[7:]) for line in lines if line.startswith("RESULT "))
    assert results == [
        ["example_single_tool_call", 0, 1.0],
        ["example_single_tool_call", 1, 1.0],
        ["lc_equivalence_rule", 0, 1.0],
        ["lc_equivalence_rule", 1, 1.0],
    ], done.stderr.decode()
    assert "RAY False" in lines


async def test_no_process_has_loaded_ray(engine, peers_processes, rays_processes):
    servers = peers_processes()
    assert len(servers) == 13
    for process in servers:
        files = [mapped.path for mapped in process.memory_maps()]
        assert not [path for path in files if "/ray/" in path]
    assert rays_processes() == []


async def test_every_server_lives(engine):
    await engine.health_check()
