"""An evaluation graded by NeMo Gym's own servers: planned on the command line, run, run again."""

import itertools
import json
from functools import partial

import anyio.to_thread
import msgspec
import pytest

from gymrl.cli.app import run_app
from gymrl.errors import ConfigError
from gymrl.evaluation import (
    EvaluationPlan,
    EvaluationSettings,
    RunOptions,
    plan_evaluation,
    run_evaluation,
)
from gymrl.evaluation.engine import with_gym
from gymrl.records import read_records
from gymrl.testing import build_tiny_model
from gymrl.testing.model_server import ModelCall, ScriptedModelServer

pytestmark = [pytest.mark.nemo_gym, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def plan(root, gym_python, tmp_path_factory):
    """Made by the command line; the policy is a tiny real model."""
    folder = tmp_path_factory.mktemp("evaluation")
    model = build_tiny_model(folder / "model")
    file = folder / "plan.json"
    command = [
        "eval",
        "plan",
        "weather",
        "weather/episodes",
        "--root",
        str(root),
        "--gym-python",
        gym_python,
    ]
    command += ["--task-id", "w1", "--repeats", "2", "--model", str(model), "--output", str(file)]
    assert run_app(command) == 0
    return EvaluationPlan.from_json(file.read_bytes())


class Watching:
    """Notes how a run begins."""

    def begin(self, plan, finished, pending):
        self.rows = finished, pending

    def started(self):
        pass

    def row(self, record):
        pass


async def test_rows_are_graded_by_gyms_servers_of_which_none_is_left_and_none_is_run_twice(
    plan, root, gym_python, peers_processes, tmp_path
):
    watching = Watching()
    options = RunOptions(
        gym_python=gym_python, gym_roots=(str(root),), num_threads=1, in_process=True
    )
    report = await run_evaluation(plan, tmp_path, options, observer=watching)
    assert (report.complete, watching.rows) == (True, (0, 4))
    agents = {"weather": "weather_agent", "weather/episodes": "weather_episodes"}
    records = list(read_records(tmp_path / "rollouts.jsonl"))
    assert len(records) == 4
    for record in records:
        trajectory = record.trajectory
        # A materialized task goes to its environment server, and its tokens come back as ever.
        assert trajectory.agent == agents[record.benchmark]
        assert trajectory.reward.total == 0.0  # noise calls no tool
        assert sum(t.end - t.generation_start for t in trajectory.turns) in range(1, 9)
    assert len({record.task_digest for record in records}) == 1
    assert peers_processes() == []
    again = await run_evaluation(plan, tmp_path, options, observer=watching)
    assert (again, watching.rows) == (report, (4, 0))


def test_the_plan_has_gyms_servers_its_version_and_no_path_of_an_interpreter(plan, gym_python):
    benchmark, episodes = plan.benchmarks
    assert benchmark.gym_version == episodes.gym_version == "0.7.0"
    assert episodes.servers["environment_server_routes"] == {"weather:today": "weather_episodes"}
    [(kind, impls)] = benchmark.servers["weather_agent"].items()
    assert (kind, impls["simple_agent"]["entrypoint"]) == ("responses_api_agents", "app.py")
    assert "policy_model" not in benchmark.servers
    text = json.dumps(msgspec.to_builtins(benchmark.servers))
    assert gym_python not in text
    assert "gymrl-policy" not in text


def test_another_gym_than_the_plans_is_refused(plan, gym_python):
    benchmark = plan.benchmarks[0]
    older = msgspec.structs.replace(benchmark, gym_version="0.6.1")
    other = EvaluationPlan.of(plan.settings, (older,))
    same = EvaluationPlan.of(plan.settings, (benchmark,))
    assert other.config_digest != same.config_digest
    with pytest.raises(ConfigError, match=r"planned with NeMo Gym 0\.6\.1, and .* has 0\.7\.0"):
        with_gym(other, RunOptions(gym_python=gym_python))
    elsewhere = RunOptions(registry_url="http://127.0.0.1:9", gym_python="/no/such/python")
    assert with_gym(other, elsewhere).gym_python is None


def judge_by_length(body):
    """The longer of two answers is better by as much as it is longer."""
    first, second = (len(body["metadata"][name]) for name in ("response_1", "response_2"))
    ranking = 1 if first > second else 6
    return ModelCall(text=json.dumps({"score_1": first, "score_2": second, "ranking": ranking}))


async def test_gyms_verifier_compares_the_attempts_at_a_task_when_all_have_come(
    root, gym_python, tmp_path
):
    lengths = itertools.count(1)
    policy = ScriptedModelServer(lambda _: ModelCall(text="x" * next(lengths)))
    async with policy, ScriptedModelServer(judge_by_length) as judge:
        port = int(judge.base_url.removesuffix("/v1").rpartition(":")[2])
        planning = partial(
            plan_evaluation,
            ["ranked"],
            EvaluationSettings.from_dict({"policy": {"name": "scripted"}}),
            overrides={"genrm_model": {"responses_api_models": {"genrm_model": {"port": port}}}},
            roots=[root],
            gym_python=gym_python,
        )
        plan = await anyio.to_thread.run_sync(planning)
        options = RunOptions(
            base_urls=(policy.base_url,),
            gym_python=gym_python,
            gym_roots=(str(root),),
            in_process=True,
            concurrency=1,
        )
        with anyio.fail_after(240):
            report = await run_evaluation(plan, tmp_path, options)
    assert report.complete
    records = list(read_records(tmp_path / "rollouts.jsonl"))
    assert sorted(record.trajectory.reward.total for record in records) == [1.0, 2.0, 3.0]
    assert len({record.cohort for record in records}) == 1
