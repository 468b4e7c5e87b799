"""A calculator that can be handed to a model: numbers and + - * / // % ** with (), nothing else.

The expression is parsed, never evaluated as Python, and every step is bounded, so that no text can
take long or use much memory.
"""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CHARS = 1000
MAX_NODES = 400
MAX_DEPTH = 60
MAX_MAGNITUDE = 10**60
MAX_EXPONENT = 100

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class ArithmeticProblem(ValueError):
    """The expression has no value here; the text says why, for whoever wrote it."""


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression.

    Raises:
        ArithmeticProblem: It does not parse, holds something else than arithmetic, divides by
            zero, or is over a limit.
    """
    if len(expression) > MAX_CHARS:
        raise ArithmeticProblem(f"longer than {MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArithmeticProblem("not an arithmetic expression") from error
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ArithmeticProblem("too many operations")
    return _value(tree.body, 0)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ArithmeticProblem("nested too deeply")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)  # type: ignore[arg-type]  # narrowed by the line above
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, depth + 1))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        return _applied(node.op, left, right)
    raise ArithmeticProblem("only numbers, + - * / // % ** and parentheses are understood")


def _applied(op: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(op, ast.Pow) and abs(right) > MAX_EXPONENT:
        raise ArithmeticProblem(f"an exponent beyond {MAX_EXPONENT}")
    try:
        result = _BINARY[type(op)](left, right)
    except ZeroDivisionError as error:
        raise ArithmeticProblem("a division by zero") from error
    except OverflowError as error:
        raise ArithmeticProblem("a number out of range") from error
    if isinstance(result, complex):
        raise ArithmeticProblem("a root of a negative number")
    return _bounded(result)


def _bounded(number: Number) -> Number:
    # The negated comparison also refuses NaN.
    if not abs(number) <= MAX_MAGNITUDE:
        raise ArithmeticProblem("a number out of range")
    return number


def shown(number: Number) -> str:
    """A number as a model reads it: whole floats without their ``.0``."""
    if isinstance(number, float) and number.is_integer():
        return str(int(number))
    return str(number)
