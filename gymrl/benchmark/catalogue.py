"""The shipped benchmarks by name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.benchmark import exact_maths, instructions, tool_arithmetic
from gymrl.benchmark.reasoning_gym import ReasoningGymPreset, load_reasoning_gym
from gymrl.benchmark.verifiers import FAMILY as VERIFIERS_FAMILY
from gymrl.benchmark.verifiers import load_verifiers
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gymrl.benchmark.base import Benchmark

_FAMILY = "reasoning_gym/"

_CHAIN_SUM = ReasoningGymPreset(
    name="chain_sum",
    description="one-digit sums and differences, graded on the last integer of the reply",
    dataset="chain_sum",
    settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    answer_extractor="last_integer",
    sampling=SamplingParams(temperature=0.7, max_tokens=24),
)


class BenchmarkInfo(msgspec.Struct, frozen=True):
    """One line of the list of benchmarks."""

    name: str
    description: str


def list_benchmarks() -> tuple[BenchmarkInfo, ...]:
    """Every shipped benchmark; names with ``<>`` stand for families."""
    return (
        BenchmarkInfo(_CHAIN_SUM.name, _CHAIN_SUM.description),
        BenchmarkInfo(
            f"{_FAMILY}<dataset>",
            "any dataset of the reasoning-gym package; its settings are parameters",
        ),
        BenchmarkInfo(tool_arithmetic.NAME, tool_arithmetic.DESCRIPTION),
        BenchmarkInfo(instructions.NAME, instructions.DESCRIPTION),
        BenchmarkInfo(exact_maths.NAME, exact_maths.DESCRIPTION),
        BenchmarkInfo(
            f"{VERIFIERS_FAMILY}<environment>",
            "an environment of the verifiers package, in the interpreter that has it",
        ),
    )


def load_benchmark(
    name: str,
    *,
    num_tasks: int = 16,
    seed: int = 0,
    params: Mapping[str, Any] | None = None,
) -> Benchmark:
    """Make a shipped benchmark: its rows and its servers.

    Args:
        name: ``chain_sum``, ``reasoning_gym/<dataset>``, ``tool_arithmetic``,
            ``instruction_following``, ``exact_maths`` or ``verifiers/<environment>``.
        num_tasks: How many tasks.
        seed: Decides the tasks; two seeds give different ones.
        params: The benchmark's own parameters.

    Raises:
        ConfigError: An unknown name or parameter, a value out of range, or a task that cannot be
            graded.
    """
    given = dict(params or {})
    if name == _CHAIN_SUM.name:
        return load_reasoning_gym(_CHAIN_SUM, num_tasks=num_tasks, seed=seed, params=given)
    if name == tool_arithmetic.NAME:
        return tool_arithmetic.load_tool_arithmetic(num_tasks=num_tasks, seed=seed, params=given)
    if name == instructions.NAME:
        return instructions.load_instructions(num_tasks=num_tasks, seed=seed, params=given)
    if name == exact_maths.NAME:
        return exact_maths.load_exact_maths(num_tasks=num_tasks, seed=seed, params=given)
    if name.startswith(_FAMILY):
        dataset = name.removeprefix(_FAMILY)
        preset = ReasoningGymPreset(
            name=name, description=f"reasoning-gym's {dataset}", dataset=dataset
        )
        return load_reasoning_gym(preset, num_tasks=num_tasks, seed=seed, params=given)
    if name.startswith(VERIFIERS_FAMILY):
        return load_verifiers(name, num_tasks=num_tasks, seed=seed, params=given)
    names = [info.name for info in list_benchmarks()]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"no benchmark is called {name!r}.{hint} Shipped: {', '.join(names)}.",
        setting="benchmark",
    )
