import psutil
import pytest

import gymrl
from gymrl.errors import GymRequestError
from gymrl.testing.model_server import ModelCall, ScriptedModelServer

OVERRIDES = {"num_tasks": 12}


async def run_all(planned, model):
    overrides = OVERRIDES | {"policy_base_url": model.base_url, "policy_model_name": "policy"}
    async with gymrl.serve_benchmark("exact_maths", overrides=overrides) as registry_server:
        runner = gymrl.TaskRunner(planned.rows, registry_server)
        return [await runner.run_task(task_id) for task_id in planned.task_ids()]


async def test_right_results_are_rewarded_however_they_are_written():
    planned = gymrl.plan_benchmark("exact_maths", overrides=OVERRIDES)
    answers = {
        row["responses_create_params"]["input"][0]["content"]: row["expected_answer"]
        for row in planned.rows
    }

    def solve(body):
        answer = answers[body["input"][0]["content"]]
        return ModelCall(text=f"So it is $\\boxed{{{answer.replace('frac', 'dfrac')}}}$.")

    before = set(psutil.Process().children(recursive=True))
    async with ScriptedModelServer(solve) as model:
        results = await run_all(planned, model)

    assert [result.rewards for result in results] == [[1.0]] * 12
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_wrong_results_and_replies_without_one_earn_nothing():
    planned = gymrl.plan_benchmark("exact_maths", overrides=OVERRIDES)
    replies = [ModelCall(text="\\boxed{12345678}"), ModelCall(text="I do not know.")]
    async with ScriptedModelServer(replies) as model:
        results = await run_all(planned, model)

    assert [result.rewards for result in results] == [[0.0]] * 12
    assert results[0].results[0]["extracted_answer"] == "12345678"


async def test_a_row_without_a_reference_is_refused_before_the_model_is_asked():
    planned = gymrl.plan_benchmark("exact_maths", overrides=OVERRIDES)
    row = {name: value for name, value in planned.rows[0].items() if name != "expected_answer"}
    async with ScriptedModelServer([ModelCall(text="1")]) as model:
        overrides = {"policy_base_url": model.base_url, "policy_model_name": "policy"}
        async with gymrl.serve_benchmark("exact_maths", overrides=overrides) as registry_server:
            with pytest.raises(GymRequestError, match="expected_answer=None is no answer"):
                await gymrl.TaskRunner([row], registry_server).run_task(row["task_id"])
    assert model.bodies == []
