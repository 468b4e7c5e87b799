"""The scorers of the reasoning-gym package, kept from running what a model wrote.

Some of them hand the answer, or a field of the row, to Python's ``eval``, or to sympy's ``parse_expr``,
which is ``eval`` too: ``__import__('os').system(...)`` between the right tags would be run by the
worker, as its user. Here both are replaced in that package's modules, and in no others, by readers of
what the scorers mean: literals and sums, and expressions of numbers, symbols and elementary functions.
Anything else is refused with ``ValueError``, which a scorer takes for an answer that can't be read.
This is the only module that takes scorers from the package.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PACKAGE = "reasoning_gym"
_MAX_LITERAL_CHARS = 100_000
_MAX_EXPRESSION_CHARS = 2000
_MAX_BITS = 65536
"""Of a number that is computed on the way: towers of powers end here."""

_MAX_SYMBOLIC_BITS = 7
"""Of the exponent of something with a symbol in it, which may be multiplied out."""

_LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)
_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
_GROWING = frozenset({"exp", "cosh", "sinh"})
_FUNCTION = re.compile(
    r"Abs|a?(?:cos|cot|csc|sec|sin|tan)h?|atan2|cbrt|exp|ln|log|Rational|sign|sqrt"
)
_CONSTANTS = frozenset({"E", "I", "pi", "oo", "GoldenRatio", "EulerGamma", "Catalan"})


def scorer_of(dataset: str) -> Callable[[str | None, dict[str, Any]], float]:
    """The package's own scorer of a dataset; it blocks, and may raise anything on odd answers.

    Args:
        dataset: One of the package's names.
    """
    from reasoning_gym.factory import get_score_answer_fn  # noqa: PLC0415 - an extra

    _replace_evaluation()
    scorer: Callable[[str | None, dict[str, Any]], float] = get_score_answer_fn(dataset)
    return scorer


def _replace_evaluation() -> None:
    """Put the readers where the package's modules have ``eval`` and sympy. Safe to repeat."""
    sympy: Any = importlib.import_module("sympy")  # the package requires it
    parse_expr = sympy.parse_expr
    for name, module in list(sys.modules.items()):
        if not name.startswith(f"{_PACKAGE}."):
            continue
        for key, value in list(vars(module).items()):
            if value is parse_expr:
                setattr(module, key, read_expression)
            elif value is sympy:
                setattr(module, key, _Sympy())
        vars(module)["eval"] = read_literal


class _Sympy:
    """sympy as it is, but for how texts are read."""

    def __getattr__(self, name: str) -> Any:
        own = {"parse_expr": read_expression}
        return own[name] if name in own else getattr(importlib.import_module("sympy"), name)


def read_literal(text: str) -> Any:
    """The value of a literal, or of arithmetic on numbers; in place of ``eval``.

    Raises:
        ValueError: It is something else, or too long.
        SyntaxError: It is no Python.
    """
    tree = _tree(text, _MAX_LITERAL_CHARS)
    for node in ast.walk(tree.body):
        if not isinstance(node, _LITERALS + _ARITHMETIC):
            raise _refused(node)
        if isinstance(node, ast.BinOp) and _size(node) is None:
            raise _refused(node)  # of texts and lists, which a factor makes long
    return eval(compile(tree, "<literal>", "eval"), {"__builtins__": {}})


def read_expression(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """The sympy expression of a text; in place of ``parse_expr``.

    Args:
        text: Numbers, names and calls of elementary functions.
        local_dict: What names mean.

    Raises:
        ValueError: It is something else, or too long.
        SyntaxError: It is no expression.
    """
    sympy: Any = importlib.import_module("sympy")
    tree = _tree(text, _MAX_EXPRESSION_CHARS)
    for node in ast.walk(tree.body):
        match node:
            case ast.Call(func=ast.Name(id=name), keywords=[]) if _FUNCTION.fullmatch(name):
                continue
            case ast.Name(id=name) if "_" not in name:
                continue
            case ast.Constant(value=int() | float() | complex()):
                continue
            case _:
                pass
        if not isinstance(node, (*_ARITHMETIC, ast.Load)):
            raise _refused(node)
    _size(tree.body)
    # As it was checked, and not as it was spelled.
    return sympy.parse_expr(ast.unparse(tree), local_dict=dict(local_dict or {}))


def _tree(text: object, most: int) -> ast.Expression:
    if not isinstance(text, str) or len(text) > most:
        raise ValueError(f"only texts of at most {most} characters are read")
    return ast.parse(text.strip(), mode="eval")


def _refused(node: ast.AST) -> ValueError:
    return ValueError(f"{type(node).__name__} is not read: it would have to be run")


def _size(node: ast.AST) -> float | None:
    """How many bits a value, or one over it, has at most; None where it is no number, or has a symbol.

    Raises:
        ValueError: They are too many.
    """
    bits: float | None = None
    match node:
        case ast.Constant(value=value):
            bits = _size_of(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            bits = 2.0
        case ast.UnaryOp(operand=operand):
            bits = _size(operand)
        case ast.BinOp(left=left, op=op, right=right):
            bits = _size_after(op, _size(left), _size(right))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            bits = _size_of_call(name, [_size(argument) for argument in arguments])
        case _:
            for child in ast.iter_child_nodes(node):
                _size(child)
    if bits is not None and bits > _MAX_BITS:
        raise ValueError(f"a number of over {_MAX_BITS} bits")
    return bits


def _size_of(value: object) -> float | None:
    if isinstance(value, int):
        return float(max(1, value.bit_length()))
    if isinstance(value, float):
        return max(1.0, float(abs(math.frexp(value)[1]))) if math.isfinite(value) else math.inf
    return None


def _size_after(op: ast.operator, left: float | None, right: float | None) -> float | None:
    if isinstance(op, ast.Pow | ast.LShift) and right is not None:
        if left is None and right > _MAX_SYMBOLIC_BITS:
            raise ValueError("a power of a symbol that is too high")
        if left is not None:
            # The exponent is below two to the number of its bits.
            most = math.ldexp(1.0, math.ceil(min(right, 64.0)))
            return left * most if isinstance(op, ast.Pow) else left + most
    if left is None or right is None:
        return None
    return left + right + 1.0


def _size_of_call(name: str, arguments: list[float | None]) -> float | None:
    known = [size for size in arguments if size is not None]
    if len(known) < len(arguments) or not known:
        return None
    most: float = max(known)
    return math.ldexp(1.0, int(min(most, 64.0)) + 1) if name in _GROWING else most
