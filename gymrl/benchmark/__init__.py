"""Benchmarks: named sets of tasks with the Gym servers that grade them.

:func:`~gymrl.benchmark.planning.plan_benchmark` plans one by its name, gymrl's own or NeMo Gym's,
:func:`~gymrl.benchmark.serving.serve_benchmark` starts its servers, and
:class:`~gymrl.benchmark.tasks.TaskRunner` runs single tasks against them.

:func:`~gymrl.benchmark.catalogue.load_benchmark` makes one of the shipped ones for a rollout
engine; :func:`~gymrl.benchmark.files.read_rows` and :func:`~gymrl.benchmark.files.read_servers`
take rows and servers from files, for everything else.
"""

from gymrl.benchmark.base import Benchmark
from gymrl.benchmark.catalogue import BenchmarkInfo, list_benchmarks, load_benchmark
from gymrl.benchmark.files import read_rows, read_servers
from gymrl.benchmark.plan import EvalPlan, PlannedBenchmark
from gymrl.benchmark.planning import plan_benchmark
from gymrl.benchmark.serving import ServedBenchmark, serve_benchmark
from gymrl.benchmark.summary import RunSummary, RunTally, SourceSummary, summarise
from gymrl.benchmark.tasks import BaseServerConfig, TaskResult, TaskRunner

__all__ = [
    "BaseServerConfig",
    "Benchmark",
    "BenchmarkInfo",
    "EvalPlan",
    "PlannedBenchmark",
    "RunSummary",
    "RunTally",
    "ServedBenchmark",
    "SourceSummary",
    "TaskResult",
    "TaskRunner",
    "list_benchmarks",
    "load_benchmark",
    "plan_benchmark",
    "read_rows",
    "read_servers",
    "serve_benchmark",
    "summarise",
]
