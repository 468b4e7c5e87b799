"""School mathematics with exact results: fractions, equations, roots, percentages.

Every result is computed with rational numbers when the task is made and written as LaTeX.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from gymrl.benchmark.base import (
    Benchmark,
    generator_seed,
    refuse_unknown_params,
    require_count,
    simple_agent_servers,
    task_id,
)
from gymrl.config import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "exact_maths"
DESCRIPTION = "fractions, equations, roots and percentages, compared as expressions by math-verify"
_HINT = "Put your final answer in \\boxed{}."


def latex(value: Fraction) -> str:
    """A rational number in lowest terms as LaTeX."""
    sign = "-" if value < 0 else ""
    if value.denominator == 1:
        return f"{sign}{abs(value.numerator)}"
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _fraction(draw: random.Random) -> Fraction:
    return Fraction(draw.randint(1, 9), draw.randint(2, 9))


def _sum_of_fractions(draw: random.Random) -> tuple[str, str]:
    first, second, third = (_fraction(draw) for _ in range(3))
    question = f"${latex(first)} + {latex(second)} - {latex(third)}$"
    return f"Compute {question} in lowest terms.", latex(first + second - third)


def _product_of_fractions(draw: random.Random) -> tuple[str, str]:
    first, second = _fraction(draw), _fraction(draw)
    question = f"$\\left({latex(first)}\\right)^2 \\cdot {latex(second)}$"
    return f"Compute {question} in lowest terms.", latex(first**2 * second)


def _linear_equation(draw: random.Random) -> tuple[str, str]:
    factor, offset, right = draw.randint(2, 12), draw.randint(1, 20), draw.randint(-20, 40)
    question = f"Solve ${factor}x + {offset} = {right}$ for $x$."
    return question, latex(Fraction(right - offset, factor))


def _quadratic_roots(draw: random.Random) -> tuple[str, str]:
    first, second = draw.sample(range(1, 10), 2)
    question = f"What is the larger root of $x^2 - {first + second}x + {first * second} = 0$?"
    return question, str(max(first, second))


def _simplified_root(draw: random.Random) -> tuple[str, str]:
    outer, inner = draw.randint(2, 9), draw.choice([2, 3, 5, 6, 7])
    return f"Simplify $\\sqrt{{{outer * outer * inner}}}$.", f"{outer}\\sqrt{{{inner}}}"


def _percentage(draw: random.Random) -> tuple[str, str]:
    percent, whole = draw.choice([5, 12, 15, 35, 45, 60]), draw.randint(3, 40) * 10
    return f"What is ${percent}\\%$ of ${whole}$?", latex(Fraction(percent * whole, 100))


_KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _sum_of_fractions,
    _product_of_fractions,
    _linear_equation,
    _quadratic_roots,
    _simplified_root,
    _percentage,
)


def _row(index: int, seed: int, draw: random.Random) -> dict[str, Any]:
    question, answer = draw.choice(_KINDS)(draw)
    return {
        "task_id": task_id(NAME, seed, index),
        "task_source": NAME,
        "question": question,
        "expected_answer": answer,
        "responses_create_params": {"input": [{"role": "user", "content": f"{question}\n{_HINT}"}]},
    }


def load_exact_maths(*, num_tasks: int, seed: int, params: dict[str, Any]) -> Benchmark:
    """Generate tasks.

    Args:
        num_tasks: How many.
        seed: Decides the tasks; a shorter benchmark is the beginning of a longer one.
        params: There are none.

    Raises:
        ConfigError: A parameter is given, or the number of tasks is not positive.
    """
    require_count(num_tasks)
    refuse_unknown_params(NAME, params, [])
    base = generator_seed(NAME, seed)
    resources = {"entrypoint": "gymrl.benchmark.maths_server:MathsServer"}
    return Benchmark(
        name=NAME,
        description=DESCRIPTION,
        rows=tuple(_row(i, seed, random.Random(base + i)) for i in range(num_tasks)),
        servers=simple_agent_servers(NAME, NAME, resources, max_steps=1),
        sampling=SamplingParams(max_tokens=512),
    )
