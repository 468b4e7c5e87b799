import msgspec
import pytest

from gymrl.benchmark.plan import PlanBenchmark, PlanGym, build_plan
from gymrl.evaluation import EvaluationPlan, EvaluationSettings
from gymrl.evaluation.plan import BenchmarkPlan
from gymrl.records.schema import RowRecord, SamplingRecord, TrajectoryRecord
from gymrl.types import Failure, FailureKind, Reward, Turn


def dataset_row(task_id, source="math", **fields):
    return {
        "task_id": task_id,
        "task_source": source,
        "responses_create_params": {"input": f"solve {task_id}"},
        **fields,
    }


def server(name):
    return {name: {"resources_servers": {"ours": {"entrypoint": "a.b:C", "level": 1}}}}


@pytest.fixture
def make_benchmark():
    """A benchmark of rows made by hand; a task is a name, or a whole row."""

    def make(label="math", tasks=("t1", "t2", "t3"), repeats=2, **fields):
        rows = [task if isinstance(task, dict) else dataset_row(task, label) for task in tasks]
        plan = build_plan(
            rows,
            benchmark=PlanBenchmark(label, [f"benchmarks/{label}/config.yaml"]),
            taskset=label,
            gym=PlanGym("gymrl-test", None),
        )
        fields.setdefault("servers", server(label))
        return BenchmarkPlan(
            label=label, name=label, repeats=repeats, plan=plan, rows=rows, **fields
        )

    return make


@pytest.fixture
def make_plan(make_benchmark):
    """A plan of one benchmark, or of those that are given."""

    def make(*benchmarks, settings=None, **fields):
        chosen = benchmarks or (make_benchmark(**fields),)
        return EvaluationPlan.of(settings or EvaluationSettings(), chosen)

    return make


@pytest.fixture
def make_record():
    """The line of an attempt at a planned task: a reward, or None for a failure."""

    def make(task, repeat=0, reward=1.0, *, rollout_id=None, error="RolloutTimeout", **fields):
        cohort = fields.pop("cohort", "")
        failure_fields = fields.pop("failure_fields", {})
        failure = None
        trajectory = None
        if reward is None:
            failure = Failure(
                kind=FailureKind.INFRA, error=error, message="too late", fields=failure_fields
            )
        else:
            tokens = fields.pop("tokens", 3)
            ledger = reward if isinstance(reward, Reward) else Reward(reward)
            trajectory = TrajectoryRecord(
                agent="agent",
                token_ids=list(range(2 + tokens)),
                logprobs=[0.0, 0.0] + [-0.5] * tokens,
                turns=(Turn(start=0, generation_start=2, end=2 + tokens),),
                reward=ledger,
                incomplete_reason=fields.pop("incomplete_reason", None),
                truncated_prefix=fields.pop("truncated_prefix", False),
                placeholder=fields.pop("placeholder", False),
                result=msgspec.Raw(fields.pop("result", b"{}")),
            )
        return RowRecord(
            group=task.number,
            group_size=task.repeats,
            index=task.first_row + repeat,
            task_index=task.number,
            rollout_index=repeat,
            route="agent",
            rollout_id=rollout_id or f"{task.number}-{repeat}-{len(msgspec.json.encode(fields))}",
            task_digest=task.key.digest,
            sampling=SamplingRecord(),
            trajectory=trajectory,
            failure=failure,
            benchmark=task.key.benchmark,
            task_id=task.task_id,
            cohort=cohort,
        )

    return make
