"""What two plans do not have in common, field by field, in words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gymrl.evaluation.plan import deciding_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gymrl.evaluation.plan import BenchmarkPlan, EvaluationPlan

_SHOWN_IDS = 5
_SHOWN_CHARS = 120
_ABSENT = object()


def plan_differences(old: EvaluationPlan, new: EvaluationPlan) -> list[str]:
    """One line a difference that can change a result, or which results there are; none: the same.

    Args:
        old: Before.
        new: Now.
    """
    found = list(config_differences(old, new))
    before = {benchmark.label: benchmark for benchmark in old.benchmarks}
    after = {benchmark.label: benchmark for benchmark in new.benchmarks}
    for label in before | after:
        if label not in after:
            found.append(f"benchmark {label!r}: is no longer in the plan")
        elif label not in before:
            found.append(f"benchmark {label!r}: is new in the plan")
        else:
            found += _benchmark_differences(before[label], after[label])
    return found


def config_differences(old: EvaluationPlan, new: EvaluationPlan) -> Iterator[str]:
    """The differences in settings and in the servers of benchmarks that both plans have."""
    both = {each.label for each in old.benchmarks} & {each.label for each in new.benchmarks}
    before, after = (
        deciding_settings(plan.settings, tuple(b for b in plan.benchmarks if b.label in both))
        for plan in (old, new)
    )
    yield from _leaves(before["settings"], after["settings"], "")
    yield from _leaves(before["servers"], after["servers"], "servers")


def is_extension(old: EvaluationPlan, new: EvaluationPlan) -> bool:
    """Whether `new` has all that `old` has, asked in the same way, and maybe more.

    Every benchmark, every task with the same input, as many repeats or more.
    """
    if list(config_differences(old, new)):
        return False
    after = {benchmark.label: benchmark for benchmark in new.benchmarks}
    return all(
        each.label in after
        and each.repeats <= after[each.label].repeats
        and each.digests().items() <= after[each.label].digests().items()
        for each in old.benchmarks
    )


def _benchmark_differences(old: BenchmarkPlan, new: BenchmarkPlan) -> Iterator[str]:
    where = f"benchmark {old.label!r}"
    if old.name != new.name:
        yield f"{where}: name: {old.name!r} -> {new.name!r}"
    if old.repeats != new.repeats:
        yield f"{where}: repeats: {old.repeats} -> {new.repeats}"
    before, after = old.digests(), new.digests()
    changed = [task for task, digest in before.items() if after.get(task, digest) != digest]
    for what, tasks in (
        ("added", [task for task in after if task not in before]),
        ("removed", [task for task in before if task not in after]),
        ("changed in their input", changed),
    ):
        if tasks:
            more = f", ... ({len(tasks) - _SHOWN_IDS} more)" if len(tasks) > _SHOWN_IDS else ""
            yield f"{where}: {len(tasks)} tasks {what}: {', '.join(tasks[:_SHOWN_IDS])}{more}"


def _leaves(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            place = f"{path}.{name}" if path else name
            yield from _leaves(old.get(name, _ABSENT), new.get(name, _ABSENT), place)
    elif old is not new and old != new:
        yield f"{path}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "(not there)"
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
