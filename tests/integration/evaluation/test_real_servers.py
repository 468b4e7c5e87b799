"""Shipped benchmarks over a real (tiny) model that is served elsewhere."""

import json

import pytest

from gymrl.actors import spawn
from gymrl.config import GenerationConfig
from gymrl.errors import ConfigError
from gymrl.evaluation import (
    BenchmarkChoice,
    EvaluationSettings,
    RunOptions,
    plan_evaluation,
    run_evaluation,
)
from gymrl.generation.service import GenerationService
from gymrl.records import read_records
from gymrl.testing.model_server import ModelCall, ScriptedModelServer
from gymrl.testing.models import build_tiny_model


@pytest.mark.timeout(240)  # a model is loaded
async def test_flavors_of_a_family_are_graded_by_servers_of_their_own(tmp_path):
    settings = EvaluationSettings.from_dict(
        {
            "policy": {"name": "policy"},
            "sampling": {"temperature": 0.0, "max_output_tokens": 6},
        }
    )
    plan = plan_evaluation(
        [
            "reasoning_gym/gcd",
            BenchmarkChoice(
                name="reasoning_gym/gcd", label="whole", overrides={"answer_extractor": "whole"}
            ),
        ],
        settings,
        repeats=2,
        overrides={"num_tasks": 2},
    )
    model = build_tiny_model(tmp_path / "tiny")
    config = GenerationConfig(model=str(model), num_threads=1, max_batch_size=1)
    async with spawn(GenerationService, in_process=True, config=config) as generation:
        endpoint = await generation.call("start")
        options = RunOptions(base_urls=(endpoint.base_url,), tokenizer=str(model), in_process=True)
        report = await run_evaluation(plan, tmp_path / "run", options)

    assert report.complete
    records = list(read_records(tmp_path / "run" / "rollouts.jsonl"))
    assert {(r.benchmark, r.route) for r in records} == {
        ("reasoning_gym/gcd", "reasoning_gym"),
        ("whole", "reasoning_gym_2"),
    }
    assert list(report.benchmarks["whole"].sources) == ["reasoning_gym"]
    # Greedy: the repeats of a task are alike, whatever their seeds are.
    answers = {}
    for record in records:
        assert record.sampling.temperature == 0.0
        answers.setdefault(record.task_digest, set()).add(tuple(record.trajectory.token_ids))
    assert [len(same) for same in answers.values()] == [1, 1, 1, 1]
    assert len({record.sampling.seed for record in records}) == 8


def test_what_cannot_be_asked_is_refused_when_it_is_planned(tmp_path):
    folder = tmp_path / "benchmarks" / "odd"
    folder.mkdir(parents=True)
    row = {"task_id": "t1", "responses_create_params": {"input": "x", "top_k": 3}}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "config.yaml").write_text(
        """
odd:
  resources_servers:
    ours:
      entrypoint: "gymrl.gym.embedded.reasoning_gym:ReasoningGymServer"
      datasets: [{name: odd, type: benchmark, jsonl_fpath: benchmarks/odd/rows.jsonl}]
"""
    )
    with pytest.raises(AssertionError, match=r"benchmark 'odd', task 't1': .*top_k"):
        plan_evaluation(["odd"], roots=[tmp_path])
    row["responses_create_params"] = {"input": "x", "temperature": "hot"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"task 't1': .*temperature"):
        plan_evaluation(["odd"], roots=[tmp_path])


@pytest.mark.parametrize("repeats", [0, -1, True, 1.5])
def test_repeats_must_be_a_count(repeats):
    with pytest.raises(ConfigError, match="positive integer"):
        plan_evaluation(["chain_sum"], repeats=repeats, overrides={"num_tasks": 1})


def test_benchmarks_are_a_list():
    with pytest.raises(ConfigError, match="a list of names"):
        plan_evaluation("chain_sum")


KEYED = """
keyed:
  resources_servers:
    keyed:
      entrypoint: tests.integration.evaluation.comparing:Keyed
      judge_api_key: ${oc.env:JUDGE_KEY_OF_A_TEST}
      datasets:
      - {name: keyed, type: benchmark, jsonl_fpath: benchmarks/keyed/rows.jsonl}
keyed_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: gymrl.gym.embedded.simple_agent:SimpleAgent
      resources_server: {type: resources_servers, name: keyed}
      model_server: {type: responses_api_models, name: policy_model}
"""


async def test_a_key_of_ours_is_in_no_plan_and_reaches_its_server(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY_OF_A_TEST", "sk-very-secret")
    folder = tmp_path / "benchmarks" / "keyed"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(KEYED)
    (folder / "rows.jsonl").write_text(
        '{"task_id": "a", "responses_create_params": {"input": "x"}}'
    )
    settings = EvaluationSettings.from_dict({"policy": {"name": "scripted"}})
    plan = plan_evaluation(["keyed"], settings, roots=[tmp_path])
    assert "sk-very" not in plan.to_json()
    async with ScriptedModelServer([ModelCall(text="sk-very-secret")]) as server:
        options = RunOptions(base_urls=(server.base_url,), in_process=True)
        report = await run_evaluation(plan, tmp_path / "run", options)
    assert report.benchmarks["keyed"].total.reward.mean == 1.0
