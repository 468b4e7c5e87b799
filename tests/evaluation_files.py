"""Directories of evaluations, made of literals, for the tests of what reads them."""

import msgspec

from gymrl.benchmark.plan import PlanBenchmark, PlanGym, build_plan
from gymrl.evaluation import EvaluationPlan, EvaluationSettings, PolicySettings
from gymrl.evaluation.journal import Journal
from gymrl.evaluation.plan import BenchmarkPlan
from gymrl.records import RowRecord, SamplingRecord, TrajectoryRecord
from gymrl.types import Failure, FailureKind, Reward, Turn


def plan_of(benchmarks, repeats):
    """A plan of ``{label: {task id: source}}``."""
    return EvaluationPlan.of(
        EvaluationSettings(policy=PolicySettings(model="tiny")),
        tuple(_benchmark(label, tasks, repeats) for label, tasks in benchmarks.items()),
    )


def _benchmark(label, tasks, repeats):
    rows = [
        {
            "task_id": task_id,
            "task_source": source,
            "responses_create_params": {"input": f"solve {task_id}"},
        }
        for task_id, source in tasks.items()
    ]
    plan = build_plan(
        rows,
        benchmark=PlanBenchmark(label, [f"benchmarks/{label}/config.yaml"]),
        taskset=label,
        gym=PlanGym("gymrl-test", None),
    )
    servers = {label: {"resources_servers": {"ours": {"entrypoint": "a.b:C"}}}}
    return BenchmarkPlan(
        label=label, name=label, repeats=repeats, plan=plan, rows=rows, servers=servers
    )


def add_rows(directory, plan, *rows):
    """Append attempts: (task id, repeat, reward); a reward of None is a failure."""
    tasks = {task.task_id: task for task in plan.tasks()}
    with Journal(directory, plan) as journal:
        for task_id, repeat, reward in rows:
            journal.add(_record(tasks[task_id], repeat, reward))
    return directory / "rollouts.jsonl"


_tries = iter(range(1_000_000))


def _record(task, repeat, reward):
    trajectory = failure = None
    if reward is None:
        failure = Failure(
            kind=FailureKind.INFRA, error="RolloutTimeout", message="no answer in 30 s"
        )
    else:
        trajectory = TrajectoryRecord(
            agent="solver",
            token_ids=[1, 2, 3, 4],
            logprobs=[0.0, 0.0, -0.5, -0.5],
            turns=(Turn(start=0, generation_start=2, end=4),),
            reward=Reward(reward),
        )
    return RowRecord(
        group=task.number,
        group_size=task.repeats,
        index=task.first_row + repeat,
        task_index=task.number,
        rollout_index=repeat,
        route="solver",
        rollout_id=f"try-{next(_tries)}",
        task_digest=task.key.digest,
        sampling=SamplingRecord(),
        task=msgspec.Raw(msgspec.json.encode(task.row)),
        trajectory=trajectory,
        failure=failure,
        benchmark=task.key.benchmark,
        task_id=task.task_id,
    )
