"""1.0 if a completion reaches the target with the given numbers, each used exactly once, else 0.0.

The expression is the completion's last line up to any `=`: whole numbers, + - * / and brackets, computed exactly. It is
parsed here and never executed; an expression longer than a person would write counts as wrong.
"""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 100

_TOKEN = re.compile(r"\d{1,9}|[-+*/()]")


def countdown_reward(
    prompt: Any,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    numbers: Sequence[int],
    target: int,
    **_: Any,
) -> float:
    lines = completion.strip().split("\n")
    expression = lines[-1].partition("=")[0]
    return float(reaches(expression, numbers, target))


def reaches(expression: str, numbers: Sequence[int], target: int) -> bool:
    tokens = _tokens(expression)
    if tokens is None or sorted(int(token) for token in tokens if token.isdigit()) != sorted(numbers):
        return False
    try:
        return _evaluate(tokens) == target
    except (SyntaxError, ZeroDivisionError):
        return False


def _tokens(expression: str) -> list[str] | None:
    """None = it holds something that does not belong in an expression."""
    if len(expression) > MAX_CHARACTERS or not expression.isascii():
        return None
    return None if _TOKEN.sub("", expression).strip() else _TOKEN.findall(expression)


def _evaluate(tokens: list[str]) -> Fraction:
    rest = iter([*tokens, ""])
    value, left_over = _sum(next(rest), rest)
    if left_over:
        raise SyntaxError(left_over)
    return value


def _sum(token: str, rest: Iterator[str]) -> tuple[Fraction, str]:
    """The value of a sum that begins with `token`, and the first token after it; `_product` and `_factor` too."""
    value, token = _product(token, rest)
    while token in ("+", "-"):
        sign = 1 if token == "+" else -1
        term, token = _product(next(rest), rest)
        value += sign * term
    return value, token


def _product(token: str, rest: Iterator[str]) -> tuple[Fraction, str]:
    value, token = _factor(token, rest)
    while token in ("*", "/"):
        times = token == "*"
        factor, token = _factor(next(rest), rest)
        value = value * factor if times else value / factor
    return value, token


def _factor(token: str, rest: Iterator[str]) -> tuple[Fraction, str]:
    if token == "-":
        value, token = _factor(next(rest), rest)
        return -value, token
    if token == "(":
        value, token = _sum(next(rest), rest)
        if token != ")":
            raise SyntaxError("a bracket is not closed")
        return value, next(rest)
    if not token.isdigit():
        raise SyntaxError(f"expected a number, got {token!r}")
    return Fraction(token), next(rest)
