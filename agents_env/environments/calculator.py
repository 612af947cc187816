"""A calculator for text that a model wrote: integers, + - * / // %, parentheses. Never `eval`.

Invariants:
- only the node types listed here are evaluated; a name, a call, an attribute or a power is an error;
- work is bounded: so many characters, so many digits, and results no larger than `MAGNITUDE_MAX`;
- results are exact: division gives a whole number or a reduced fraction.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from fractions import Fraction

LENGTH_MAX = 100
"""Characters of an expression; bounds the depth of its tree as well."""
MAGNITUDE_MAX = 10**12
"""Largest absolute numerator or denominator, of operands and results."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class BadExpression(ValueError):
    """The text is not an expression that this calculator computes; the message may be shown to the model."""


def calculate(expression: str) -> Fraction:
    """The exact value of `expression`. BadExpression for anything else."""
    if len(expression) > LENGTH_MAX:
        raise BadExpression(f"longer than {LENGTH_MAX} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `3 (4)` parses with a SyntaxWarning, and is refused as a call below
            tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadExpression("not an arithmetic expression") from error
    return _value(tree.body)


def format_number(value: Fraction) -> str:
    """`7`, `-3`, `1/2`: as `calculate` reads it back."""
    return str(value)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return _bounded(Fraction(number))
        case ast.UnaryOp(op=unary, operand=operand) if type(unary) in _UNARY:
            return _UNARY[type(unary)](_value(operand))
        case ast.BinOp(left=left, op=binary, right=right) if type(binary) in _BINARY:
            return _binary(_BINARY[type(binary)], _value(left), _value(right))
    raise BadExpression(f"{type(node).__name__} is not arithmetic on whole numbers")


def _binary(compute: Callable[[Fraction, Fraction], Fraction | int], left: Fraction, right: Fraction) -> Fraction:
    try:
        return _bounded(Fraction(compute(left, right)))
    except ZeroDivisionError as error:
        raise BadExpression("division by zero") from error


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) > MAGNITUDE_MAX:
        raise BadExpression(f"beyond {MAGNITUDE_MAX}")
    return value
