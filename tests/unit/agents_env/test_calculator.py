"""The calculator: exact on arithmetic, and nothing else is ever evaluated."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents_env.environments.calculator import (
    LENGTH_MAX,
    MAGNITUDE_MAX,
    BadExpression,
    calculate,
    format_number,
)
from tests.support.quick import examples


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 + 4", 7),
        (" 12 - 30 ", -18),
        ("2 * (3 + 4) - -1", 15),
        ("7 / 2", Fraction(7, 2)),
        ("7 // 2", 3),
        ("-7 % 3", 2),
        ("+5", 5),
        ("10_0", 100),
    ],
)
def test_computes_exactly(expression: str, value: int | Fraction) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "calc(3)",
        "__import__('os').system('true')",
        "().__class__",
        "a + 1",
        "2 ** 999999999",
        "1 << 99",
        "1.5 + 1",
        "True + 1",
        "'a' * 9",
        "[1][0]",
        "3 (4)",
        "1 if 1 else 2",
        "lambda: 1",
        "1; 2",
        "x := 1",
        "1 / 0",
        "1 % 0",
        "\x00",
        "(" * 60 + "1",
        "9" * (LENGTH_MAX + 1),
        "99999999999999",
        "999999 * 999999 * 999999",
    ],
)
def test_refuses_what_is_not_bounded_arithmetic(expression: str) -> None:
    with pytest.raises(BadExpression):
        calculate(expression)


def check_bounded(text: str) -> None:
    try:
        value = calculate(text)
    except BadExpression:
        return
    assert max(abs(value.numerator), value.denominator) <= MAGNITUDE_MAX


@examples(300)
@given(st.text(max_size=LENGTH_MAX + 10))
def test_any_text_gives_a_bounded_number_or_a_refusal(text: str) -> None:
    check_bounded(text)


@examples(300)
@given(st.text(alphabet="0123456789+-*/%() .e_", max_size=LENGTH_MAX))
def test_text_that_looks_like_arithmetic_is_bounded_as_well(text: str) -> None:
    check_bounded(text)


@given(st.fractions(max_denominator=10**6).filter(lambda value: abs(value.numerator) <= MAGNITUDE_MAX))
def test_a_number_it_wrote_is_read_back_the_same(value: Fraction) -> None:
    assert calculate(format_number(value)) == value


@given(st.integers(-(10**5), 10**5), st.integers(-(10**5), 10**5), st.sampled_from("+-*"))
def test_agrees_with_integer_arithmetic(left: int, right: int, symbol: str) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[symbol]
    assert calculate(f"{left} {symbol} {right}") == expected
