"""Benchmarks: named sets of tasks with the Gym servers that grade them.

:func:`~gymrl.benchmark.catalogue.load_benchmark` makes one of the shipped ones;
:func:`~gymrl.benchmark.files.read_rows` and :func:`~gymrl.benchmark.files.read_servers` take rows
and servers from files, for everything else.
"""

from gymrl.benchmark.base import Benchmark
from gymrl.benchmark.catalogue import BenchmarkInfo, list_benchmarks, load_benchmark
from gymrl.benchmark.files import read_rows, read_servers
from gymrl.benchmark.summary import RunSummary, RunTally, SourceSummary, summarise

__all__ = [
    "Benchmark",
    "BenchmarkInfo",
    "RunSummary",
    "RunTally",
    "SourceSummary",
    "list_benchmarks",
    "load_benchmark",
    "read_rows",
    "read_servers",
    "summarise",
]
