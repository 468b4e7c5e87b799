"""An evaluation's file under limits that only a process of its own can have."""

import json
import subprocess
import sys

import msgspec

from gymrl.benchmark.plan import PlanBenchmark, PlanGym, build_plan
from gymrl.evaluation import EvaluationPlan, EvaluationSettings
from gymrl.evaluation.journal import Journal
from gymrl.evaluation.plan import BenchmarkPlan
from gymrl.records.schema import RowRecord, SamplingRecord, TrajectoryRecord
from gymrl.types import Reward, Turn


def make_plan(tasks, repeats):
    rows = [
        {"task_id": f"t{n}", "task_source": "s", "responses_create_params": {"input": str(n)}}
        for n in range(tasks)
    ]
    plan = build_plan(
        rows, benchmark=PlanBenchmark("math", []), taskset="math", gym=PlanGym("test", None)
    )
    benchmark = BenchmarkPlan(label="math", name="math", repeats=repeats, plan=plan, rows=rows)
    return EvaluationPlan.of(EvaluationSettings(), (benchmark,))


def make_record(task, repeat, tokens=3):
    return RowRecord(
        group=task.number,
        group_size=task.repeats,
        index=0,
        task_index=task.number,
        rollout_index=repeat,
        route="agent",
        rollout_id=f"{task.number}-{repeat}",
        task_digest=task.key.digest,
        sampling=SamplingRecord(),
        trajectory=TrajectoryRecord(
            agent="agent",
            token_ids=list(range(tokens)),
            logprobs=[-0.5] * tokens,
            turns=(Turn(start=0, generation_start=1, end=tokens),),
            reward=Reward(1.0),
        ),
        benchmark="math",
        task_id=task.task_id,
    )


FULL = """
import resource, signal, sys
from pathlib import Path
from gymrl.errors import OutputError
from gymrl.evaluation import EvaluationPlan
from gymrl.evaluation.journal import Journal
from gymrl.records.schema import RowRecord, SamplingRecord

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
plan = EvaluationPlan.from_json(Path(sys.argv[1], "plan.json").read_bytes())
with Journal(Path(sys.argv[1]), plan) as journal:
    ((row,),) = list(journal.pending(3))[:1]
    size = journal.path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, size + 50))
    try:
        journal.add(RowRecord(
            group=0, group_size=2, index=0, task_index=0, rollout_index=0, route="a",
            rollout_id="r", task_digest=row.task.key.digest, sampling=SamplingRecord(),
            benchmark=row.task.key.benchmark, task_id=row.task.task_id,
        ))
    except OutputError as error:
        print(error)
    print(journal.path.stat().st_size == size)
"""


def test_a_full_disk_is_an_error_and_the_file_stays_whole(tmp_path):
    with Journal(tmp_path, make_plan(2, 2)) as journal:
        (first,), *_ = journal.pending(3)
        journal.add(make_record(first.task, first.repeat))
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    message, is_whole = done.stdout.splitlines()
    assert "rollouts.jsonl cannot be written: File too large" in message
    assert "can be continued" in message
    assert is_whole == "True"
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["record"] for line in lines] == ["run", "row"]


READ = """
import resource, sys
from gymrl.evaluation import read_evaluation, report_evaluation

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
report = report_evaluation(read_evaluation(sys.argv[1]))
print(report.benchmarks["math"].total.scored, peak() - before)
"""


def test_a_report_on_a_hundred_thousand_rows_keeps_a_few_numbers_of_each(tmp_path):
    tasks, repeats = 500, 200
    plan = make_plan(tasks, repeats)
    with Journal(tmp_path, plan):
        pass
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        for task in plan.tasks():
            line = msgspec.json.encode(make_record(task, 0, tokens=100))
            index, name = b'"rollout_index":0', b'"rollout_id":"%d-0"' % task.number
            assert index in line
            assert name in line
            for repeat in range(repeats):
                own = line.replace(index, b'"rollout_index":%d' % repeat)
                named = b'"rollout_id":"%d-%d"' % (task.number, repeat)
                file.write(own.replace(name, named) + b"\n")
    assert (tmp_path / "rollouts.jsonl").stat().st_size > 100e6

    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True
    )
    scored, grown = map(int, done.stdout.split())
    assert scored == tasks * repeats
    assert grown < 80e6
