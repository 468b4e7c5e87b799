"""Arithmetic over a lookup table, to be solved with tools over several turns.

Each task hides a few numbers in a table that only the ``lookup`` tool can read and asks for a sum
of products of them, so a right answer needs at least two model calls. The answer is computed here,
when the task is made, and checked against the arithmetic that the question spells out.
"""

from __future__ import annotations

import copy
import random
from typing import Any

from gymrl.benchmark.base import (
    Benchmark,
    generator_seed,
    instance_name,
    refuse_unknown_params,
    require_count,
    simple_agent_servers,
    task_id,
)
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError

NAME = "tool_arithmetic"
DESCRIPTION = "sums of looked-up numbers with a lookup and a calculator tool, several turns"

_ITEMS = [
    "apples",
    "bolts",
    "candles",
    "drums",
    "eggs",
    "forks",
    "gloves",
    "hammers",
    "inks",
    "jars",
    "kites",
    "lamps",
    "maps",
    "nails",
    "oars",
    "pens",
    "quilts",
    "ropes",
    "spoons",
    "tiles",
]
_MAX_ITEMS = 6

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "name": "lookup",
        "description": "The number of one item in the stock list.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "Name of the item."}},
            "required": ["name"],
            "additionalProperties": False,
        },
        "strict": True,
    },
    {
        "type": "function",
        "name": "calculator",
        "description": "The value of an arithmetic expression of integers with +, -, * and ().",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "For example: 3 * 14 + 2"}
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
        "strict": True,
    },
)
"""The tools, as a model is told of them (Responses API)."""


def _question(terms: list[tuple[int, str]]) -> str:
    parts = [f"{factor} times the number of {item}" for factor, item in terms]
    return (
        "A stock list holds a number for each item. Look up the numbers you need with the lookup "
        f"tool, then compute {' plus '.join(parts)} with the calculator tool. "
        "Reply with the final number only."
    )


def _row(index: int, seed: int, num_items: int, draw: random.Random) -> dict[str, Any]:
    items = draw.sample(_ITEMS, num_items + 2)
    table = {item: draw.randint(2, 99) for item in items}
    terms = [(draw.randint(2, 9), item) for item in draw.sample(items, num_items)]
    answer = sum(factor * table[item] for factor, item in terms)
    return {
        "task_id": task_id(NAME, seed, index),
        "task_source": instance_name(NAME),
        "table": table,
        "expected_answer": answer,
        "responses_create_params": {
            "input": [{"role": "user", "content": _question(terms)}],
            "tools": copy.deepcopy(list(TOOLS)),
            "parallel_tool_calls": True,
        },
    }


def load_tool_arithmetic(*, num_tasks: int, seed: int, params: dict[str, Any]) -> Benchmark:
    """Generate tasks.

    Args:
        num_tasks: How many.
        seed: Decides the tasks; a shorter benchmark is the beginning of a longer one.
        params: ``num_items`` (1 to 6, default 2): looked-up numbers in each sum; ``max_steps``
            (default ``num_items + 3``): model calls that the agent makes at most.

    Raises:
        ConfigError: An unknown parameter, or one out of range.
    """
    require_count(num_tasks)
    refuse_unknown_params(NAME, params, ["num_items", "max_steps"])
    num_items = params.get("num_items", 2)
    if not isinstance(num_items, int) or not 1 <= num_items <= _MAX_ITEMS:
        raise ConfigError(
            f"num_items={num_items!r}: must be an integer from 1 to {_MAX_ITEMS}",
            setting="num_items",
        )
    max_steps = params.get("max_steps", num_items + 3)
    if not isinstance(max_steps, int) or max_steps < 1:
        raise ConfigError(
            f"max_steps={max_steps!r}: must be a positive integer", setting="max_steps"
        )
    base = generator_seed(NAME, seed)
    rows = tuple(_row(i, seed, num_items, random.Random(base + i)) for i in range(num_tasks))
    resources = {"entrypoint": "gymrl.gym.embedded.tool_arithmetic:ToolArithmeticServer"}
    return Benchmark(
        name=NAME,
        description=DESCRIPTION,
        rows=rows,
        servers=simple_agent_servers(instance_name(NAME), NAME, resources, max_steps),
        sampling=SamplingParams(max_tokens=128),
    )
