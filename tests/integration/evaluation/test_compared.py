"""Evaluations whose verifier compares the attempts at a task with each other."""

import collections
import itertools
import json

import anyio
import pytest

from gymrl.errors import ConfigError
from gymrl.evaluation import EvaluationSettings, RunOptions, plan_evaluation, run_evaluation
from gymrl.records import read_records
from gymrl.testing.model_server import ModelCall, ScriptedModelServer

CONFIG = """
ranking:
  resources_servers:
    ranking:
      entrypoint: tests.integration.evaluation.comparing:Ranking
      num_rollouts_per_prompt: ${compared}
      datasets:
      - {name: ranking, type: benchmark, jsonl_fpath: benchmarks/ranking/rows.jsonl, num_repeats: 4}
ranking_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: gymrl.gym.embedded.simple_agent:SimpleAgent
      resources_server: {type: resources_servers, name: ranking}
      model_server: {type: responses_api_models, name: policy_model}
compared: 4
"""


@pytest.fixture
def plan(tmp_path):
    folder = tmp_path / "root" / "benchmarks" / "ranking"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    rows = [
        {
            "task_id": f"t{number}",
            "unverifiable": "xxxxx",
            "responses_create_params": {"input": [{"role": "user", "content": f"task {number}"}]},
        }
        for number in range(2)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**options):
        settings = EvaluationSettings.from_dict({"policy": {"name": "scripted"}})
        return plan_evaluation(["ranking"], settings, roots=[tmp_path / "root"], **options)

    return make


class Lengthening:
    """A policy whose answers to a task are longer each time, at most of `limit` letters."""

    def __init__(self, limit=100):
        self.asked = collections.Counter()
        self._limit = limit

    def __call__(self, body):
        task = body["input"][0]["content"]
        self.asked[task] += 1
        return ModelCall(text="x" * min(self.asked[task], self._limit))


async def evaluate(plan, directory, policy, **options):
    async with ScriptedModelServer(policy) as server:
        chosen = RunOptions(base_urls=(server.base_url,), in_process=True, **options)
        return await run_evaluation(plan, directory, chosen)


def rewards_of(directory):
    found = collections.defaultdict(list)
    for record in read_records(directory / "rollouts.jsonl"):
        if record.trajectory is not None:
            found[record.task_id, record.rollout_index // 4].append(record.trajectory.reward.total)
    return {key: sorted(rewards) for key, rewards in found.items()}


RANKS = [0.0, 1 / 3, 2 / 3, 1.0]


@pytest.mark.parametrize("concurrency", [1, 4, 128])
async def test_repeats_of_a_task_are_graded_against_each_other(plan, tmp_path, concurrency):
    report = await evaluate(
        plan(repeats=8), tmp_path / "run", Lengthening(), concurrency=concurrency
    )
    assert report.complete
    assert rewards_of(tmp_path / "run") == {
        (task, cohort): RANKS for task in ("t0", "t1") for cohort in (0, 1)
    }
    assert report.benchmarks["ranking"].total.reward.mean == pytest.approx(0.5)


async def test_one_attempt_that_cannot_be_judged_costs_its_whole_cohort_which_is_made_again(
    plan, tmp_path
):
    # From the fifth on the verifier refuses all answers, so a second cohort is never whole; that its
    # peers would wait for half an hour is not waited for.
    with anyio.fail_after(50):
        first = await evaluate(plan(repeats=8), tmp_path / "run", Lengthening(limit=5))
    total = first.benchmarks["ranking"].total
    assert (total.scored, total.failed, total.missing) == (8, 8, 0)
    assert total.failures[0].error == "CohortIncomplete"
    assert "which it is compared with, failed" in total.failures[0].example

    again = await evaluate(plan(repeats=8), tmp_path / "run", Lengthening())
    assert again.complete
    assert rewards_of(tmp_path / "run") == {
        (task, cohort): RANKS for task in ("t0", "t1") for cohort in (0, 1)
    }


async def test_a_cohort_that_the_fleet_failed_is_made_again_whole_in_the_same_run(plan, tmp_path):
    lengthening, rollouts = Lengthening(), tmp_path / "run" / "rollouts.jsonl"

    def policy(body):
        """It is away for the first task until that has failed for good."""
        if body["input"][0]["content"] == "task 0" and '"failure":{' not in rollouts.read_text():
            return ModelCall(status=503, text="restarting")
        return lengthening(body)

    report = await evaluate(plan(), tmp_path / "run", policy, concurrency=1)
    assert report.complete
    assert rewards_of(tmp_path / "run") == {("t0", 0): RANKS, ("t1", 0): RANKS}

    lines = [json.loads(line) for line in rollouts.read_text().splitlines()[1:]]
    cohorts = [list(group) for _, group in itertools.groupby(lines, lambda line: line["cohort"])]
    assert [(len(group), group[0]["task_id"]) for group in cohorts] == [
        (4, "t0"), (4, "t1"), (4, "t0")
    ]  # fmt: skip
    assert [bool(group[0].get("failure")) for group in cohorts] == [True, False, False]
    assert "503" in cohorts[0][0]["failure"]["message"]


def test_a_number_of_repeats_that_no_cohort_fills_is_refused_when_it_is_planned(plan):
    with pytest.raises(ConfigError, match="repeats=6: its verifier compares 4 attempts"):
        plan(repeats=6)
    with pytest.raises(ConfigError, match="num_rollouts_per_prompt=0: must be a positive"):
        plan(overrides={"compared": 0})
    assert plan(overrides={"compared": 1}, repeats=3).benchmarks[0].group_size == 1
