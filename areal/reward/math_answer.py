r"""1.0 if a completion's final answer equals the expected one as a quantity, else 0.0.

The final answer is the first of these that is present, each in its last occurrence: `\boxed{...}`, the text after
`####`, the text after "answer is" or "answer:", the last number. Two numbers are compared as quantities (`1,000`,
`$1000`, `1e3` and `1000.0` are equal; so are `\frac{1}{2}`, `1/2` and `0.5`), two other answers as text, ignoring case
and spacing. Symbolic equivalence is not attempted. Time is linear in the text and the length of numbers is bounded, so
that no completion can make a caller wait.
"""

import math
import re
from fractions import Fraction
from typing import Any

_MAX_NUMBER_CHARS = 64
_RELATIVE_TOLERANCE = 1e-6

_NUMBER = re.compile(r"(?<![\d.])-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,2}\b|/\d+)?")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?")
_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}")
_STATED = re.compile(r"answer(?:\s+is\b\s*:?|\s*:)([^\n]*)", re.IGNORECASE)
_SIGNS = re.compile(r"\\?[$%]|\\[,;! ]|(?<=\d)\{?,\}?(?=\d{3}(?!\d))")
_NOISE = re.compile(r"\\(?:text|mathrm)\b|[\s{}*]")


def math_answer_reward(
    prompt: Any, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: Any, **_: Any
) -> float:
    found = extract_answer(completion)
    expected = str(answer)
    return float(found is not None and answers_equal(found, marked_answer(expected) or expected))


def extract_answer(completion: str) -> str | None:
    """The final answer as it is written, or None if there is no candidate."""
    marked = marked_answer(completion)
    if marked is not None:
        return marked
    stated = _STATED.findall(completion)
    if stated and stated[-1].strip():
        return _stated_answer(stated[-1])
    return number_in(completion, first=False)


def marked_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, else the line after the last `####`."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, after = text.rpartition("####")
    return after.strip().partition("\n")[0].strip() if mark and after.strip() else None


def answers_equal(left: str, right: str) -> bool:
    a, b = parse_number(left), parse_number(right)
    if a is None or b is None:
        return a is b and _normalised(left) == _normalised(right)
    if a.denominator == b.denominator == 1:
        return a == b
    return math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE)


def parse_number(text: str) -> Fraction | None:
    """The quantity that `text` writes, or None if it is something else or too long to be an answer."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    bare = _FRACTION.sub(r"\1\2/\3", _SIGNS.sub("", text)).strip().strip("*").rstrip(".")
    above, _, below = (part.strip() for part in bare.partition("/"))
    if not _DECIMAL.fullmatch(above) or not _DECIMAL.fullmatch(below or "1"):
        return None
    divisor = Fraction(below or "1")
    return Fraction(above) / divisor if divisor else None


def number_in(text: str, *, first: bool) -> str | None:
    """The first or the last number in `text`, as it is written."""
    numbers = _NUMBER.findall(text)
    return str(numbers[0 if first else -1]) if numbers else None


def _last_boxed(text: str) -> str | None:
    _, mark, after = text.rpartition("\\boxed{")
    depth = 1
    for position, character in enumerate(after if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return after[:position].strip()
    return None


def _stated_answer(line: str) -> str:
    """The answer in what follows "answer is": all of it if it is a number, else the first number after any `=`."""
    tail = line.rpartition("=")[2].strip(" .*")
    return tail if parse_number(tail) is not None else number_in(tail, first=True) or tail


def _normalised(text: str) -> str:
    return _NOISE.sub("", _SIGNS.sub("", text)).rstrip(".").casefold()
