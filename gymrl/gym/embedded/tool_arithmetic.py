"""Sums over a table that only a tool can read: a small environment of several turns.

A row brings ``table`` (numbers by name) and ``expected_answer``. The model looks names up, computes
with the calculator, and its final message must end with the number.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from gymrl.gym.embedded.arithmetic import ArithmeticProblem, evaluate, shown
from gymrl.gym.embedded.base import RefusedRequest
from gymrl.gym.embedded.resources import ResourcesServer, ToolError, Verdict, tool

if TYPE_CHECKING:
    from gymrl.gym.embedded.reply import Reply

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


class ToolArithmeticServer(ResourcesServer):
    """See the module."""

    async def seed_session(self, row: dict[str, Any]) -> dict[str, float]:
        """The session's table.

        Raises:
            RefusedRequest: The row has no table of numbers, or no finite expected answer.
        """
        table = row.get("table")
        if not isinstance(table, dict) or not all(_is_number(v) for v in table.values()):
            raise RefusedRequest("the row's table must be an object of numbers by name")
        if not _is_number(row.get("expected_answer")):
            raise RefusedRequest("the row's expected_answer must be a finite number")
        return dict(table)

    @tool
    async def lookup(self, state: dict[str, float], name: str) -> str:
        """The number under a name; the names that exist when it is not one of them."""
        key = name.strip().lower()
        if key not in state:
            raise ToolError(f"no entry {name[:100]!r}; entries: {', '.join(sorted(state))}")
        return shown(state[key])

    @tool
    async def calculator(self, state: dict[str, float], expression: str) -> str:
        """The value of an arithmetic expression."""
        try:
            return shown(evaluate(expression))
        except ArithmeticProblem as problem:
            raise ToolError(f"cannot compute {expression[:100]!r}: {problem}") from problem

    async def verify(
        self, row: dict[str, Any], reply: Reply, state: dict[str, float] | None
    ) -> Verdict:
        """1.0 when the last number of the final message is the expected one, else 0.0."""
        expected: Any = row.get("expected_answer")
        if not _is_number(expected):
            raise RefusedRequest("the row's expected_answer must be a finite number")
        numbers = _NUMBER.findall(reply.text)
        answer = float(numbers[-1].replace(",", "")) if numbers else None
        right = answer is not None and math.isclose(answer, float(expected), abs_tol=1e-9)
        return Verdict(
            reward=float(right),
            extras={
                "expected_answer": expected,
                "extracted_answer": answer if answer is None or math.isfinite(answer) else None,
                "num_tool_calls": len(reply.tool_calls),
            },
        )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
