import json

import pytest

from gymrl.actors import spawn
from gymrl.config import GymConfig
from gymrl.gym.service import GymService
from gymrl.testing.model_server import ModelCall, ScriptedModelServer
from gymrl.types import Failure, Trajectory


def servers(name, entrypoint, **settings):
    return {
        name: {"resources_servers": {name: {"entrypoint": entrypoint, **settings}}},
        f"{name}_agent": {
            "responses_api_agents": {
                "simple_agent": {
                    "entrypoint": "gymrl.gym.embedded.simple_agent:SimpleAgent",
                    "resources_server": {"type": "resources_servers", "name": name},
                    "model_server": {"type": "responses_api_models", "name": "policy_model"},
                    "max_steps": 4,
                }
            }
        },
    }


ARITHMETIC = servers("arith", "gymrl.gym.embedded.tool_arithmetic:ToolArithmeticServer")
REASONING = servers(
    "reason",
    "gymrl.gym.embedded.reasoning_gym:ReasoningGymServer",
    answer_extractor="last_integer",
)


async def roll_out(config, model, *rows):
    async with spawn(GymService, in_process=True, config=config) as gym:
        await gym.call("spin_up", [model.base_url], "policy")
        results = [result async for result in gym.stream("run_rollouts", list(rows))]
        await gym.call("shutdown")
    return {result.index: result.outcome for result in results}


async def test_one_row_goes_through_tools_to_a_reward_with_the_sampled_tokens(make_row):
    script = [
        ModelCall(tool_calls=(("lookup", '{"name": "pens"}'),)),
        ModelCall(tool_calls=(("calculator", '{"expression": "3*14"}'),)),
        ModelCall(text="That makes 42."),
    ]
    row = make_row(0, "arith", table={"pens": 14}, expected_answer=42)
    async with ScriptedModelServer(script) as model:
        outcome = (await roll_out(GymConfig(servers=ARITHMETIC), model, row))[0]
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward.verifier == 1.0
    assert len(outcome.turns) == 3
    sampled = [
        bytes(outcome.token_ids[t.generation_start : t.end].tolist()).decode()
        for t in outcome.turns
    ]
    assert sampled[2] == "That makes 42."
    added = [
        bytes(outcome.token_ids[t.start : t.generation_start].tolist()).decode()
        for t in outcome.turns
    ]
    assert added == ["hi", "14", "42"]
    result = json.loads(outcome.result)
    assert result["extracted_answer"] == 42.0
    assert result["response"]["usage"]["output_tokens"] == outcome.num_generated


async def test_rows_of_two_environments_in_one_worker_fail_alone(make_row):
    entry = {"question": "1+1?", "answer": "2", "metadata": {}}
    rows = [
        make_row(0, "reason", dataset="chain_sum", entry=entry),
        make_row(1, "reason_agent", dataset="chain_sum", entry=entry | {"answer": None}),
        make_row(2, "arith", table={"a": 1}, expected_answer=3),
        make_row(3, "nowhere"),
    ]
    config = GymConfig(servers={**ARITHMETIC, **REASONING})
    async with ScriptedModelServer([ModelCall(text="It is 2")]) as model:
        outcomes = await roll_out(config, model, *rows)
    assert outcomes[0].reward.verifier == 1.0
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].kind == "data"
    assert outcomes[1].status == 422
    assert "no answer" in outcomes[1].message
    assert outcomes[2].reward.verifier == 0.0
    assert isinstance(outcomes[3], Failure)
    assert "Known routes: arith, arith_agent, reason, reason_agent" in outcomes[3].message


async def test_sessions_of_many_rows_at_once_do_not_mix(make_row):
    def answer(body):
        outputs = [i["output"] for i in body["input"] if i.get("type") == "function_call_output"]
        if not outputs:
            return ModelCall(tool_calls=(("lookup", '{"name": "a"}'),))
        return ModelCall(text=outputs[-1])

    rows = [make_row(i, "arith", table={"a": i}, expected_answer=i) for i in range(64)]
    async with ScriptedModelServer(answer) as model:
        outcomes = await roll_out(GymConfig(servers=ARITHMETIC), model, *rows)
    assert sorted(outcomes) == list(range(64))
    for index, outcome in outcomes.items():
        assert outcome.reward.verifier == 1.0
        assert json.loads(outcome.result)["extracted_answer"] == index


@pytest.mark.parametrize(("status", "kind"), [(400, "data"), (500, "infra"), (503, "infra")])
async def test_the_model_servers_status_decides_whose_fault_the_row_is(make_row, status, kind):
    script = [ModelCall(status=status, text="maximum context length is 16")]
    row = make_row(0, "arith", table={"a": 1}, expected_answer=3)
    async with ScriptedModelServer(script) as model:
        outcome = (await roll_out(GymConfig(servers=ARITHMETIC), model, row))[0]
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.status) == (kind, status)
    assert "maximum context length is 16" in outcome.message


async def test_a_model_server_that_runs_elsewhere_is_named_by_host_and_port(make_row):
    script = [ModelCall(text="It is 2.")]
    async with ScriptedModelServer(script) as judge, ScriptedModelServer([]) as policy:
        host, port = judge.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        elsewhere = {"entrypoint": "runs_elsewhere", "host": host, "port": int(port)}
        asking_it = servers("reason", "gymrl.gym.embedded.reasoning_gym:ReasoningGymServer")
        agent = asking_it["reason_agent"]["responses_api_agents"]["simple_agent"]
        agent["model_server"] = {"type": "responses_api_models", "name": "judge"}
        config = GymConfig(
            servers=asking_it | {"judge": {"responses_api_models": {"genrm_model": elsewhere}}}
        )
        entry = {"question": "1+1?", "answer": "2", "metadata": {}}
        row = make_row(0, "reason", dataset="chain_sum", entry=entry)
        outcome = (await roll_out(config, policy, row))[0]
        assert isinstance(outcome, Trajectory), outcome
        assert (len(judge.bodies), policy.bodies) == (1, [])
