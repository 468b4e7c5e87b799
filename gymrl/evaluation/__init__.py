"""Evaluations: benchmarks planned, run so that a kill loses nothing, reported and compared.

::

    plan = plan_evaluation(["chain_sum", "tool_arithmetic"], settings, repeats=4)
    report = await run_evaluation(plan, "runs/first")
    print(report.benchmarks["chain_sum"].total.reward)

:func:`~gymrl.evaluation.run.run_evaluation` continues what a directory holds. What it holds is read
by :func:`~gymrl.evaluation.reading.read_evaluation`, and two of them are set side by side by
:func:`~gymrl.evaluation.comparison.compare`.
"""

from gymrl.evaluation.comparison import Comparison, compare
from gymrl.evaluation.differences import plan_differences
from gymrl.evaluation.plan import EvaluationPlan
from gymrl.evaluation.planning import BenchmarkChoice, plan_evaluation
from gymrl.evaluation.reading import Evaluation, read_evaluation
from gymrl.evaluation.report import EvaluationReport, report_evaluation
from gymrl.evaluation.run import run_evaluation
from gymrl.evaluation.running import EvaluationObserver
from gymrl.evaluation.settings import (
    EvaluationSettings,
    PolicySettings,
    RunOptions,
    SamplingSettings,
)

__all__ = [
    "BenchmarkChoice",
    "Comparison",
    "Evaluation",
    "EvaluationObserver",
    "EvaluationPlan",
    "EvaluationReport",
    "EvaluationSettings",
    "PolicySettings",
    "RunOptions",
    "SamplingSettings",
    "compare",
    "plan_differences",
    "plan_evaluation",
    "read_evaluation",
    "report_evaluation",
    "run_evaluation",
]
