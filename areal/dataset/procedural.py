"""Built-in tasks, posed as chat `messages` with an `answer`.

A task is a numbered space of problems. Which split a problem belongs to is decided by a hash of its text, so splits are
disjoint whatever their size, and no arithmetic on the number can skew them.
"""

import hashlib
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol

Split = Literal["train", "valid", "test"]
SPLITS: dict[Split, range] = {"test": range(0, 20), "valid": range(20, 30), "train": range(30, 100)}
"""Percentiles of the hash that each split takes."""


class Posed(Protocol):
    """A problem as a task."""

    def as_task(self) -> dict[str, Any]: ...


class BuiltinTask(Protocol):
    """What `builtin:NAME` needs of a task; `ProceduralTask` is one."""

    def problems(self, split: Split, seed: int = 0) -> Iterator[Posed]: ...


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str

    def as_task(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": self.question}], "answer": self.answer}


@dataclass(frozen=True)
class ProceduralTask:
    size: int
    """Problems are numbered 0 … size - 1."""
    problem: Callable[[int], Problem]

    def problems(self, split: Split, seed: int = 0) -> Iterator[Problem]:
        """Every problem of a split, in an order drawn from `seed`."""
        order = list(range(self.size))
        random.Random(seed).shuffle(order)
        return (problem for problem in map(self.problem, order) if split_of(problem) == split)


def split_of(problem: Problem) -> Split:
    percentile = int.from_bytes(hashlib.blake2b(problem.question.encode(), digest_size=8).digest()) % 100
    return next(split for split, share in SPLITS.items() if percentile in share)


def _sort_digits(number: int) -> Problem:
    digits = f"{number:04d}"
    return Problem(f"Sort {digits}", "".join(sorted(digits)))


def _sum(number: int) -> Problem:
    first, second = divmod(number, 100)
    return Problem(f"What is {first} + {second}?", str(first + second))


def _two_operands(number: int) -> Problem:
    operands, kind = divmod(number, 3)
    first, second = divmod(operands, 40)
    name, apply = _OPERATORS[kind]
    return Problem(f"What is {first} {name} {second}?", str(apply(first, second)))


def _three_operands(number: int) -> Problem:
    operators, digits = divmod(number, 1000)
    first, second, third = map(int, f"{digits:03d}")
    (left, apply_left), (right, apply_right) = _OPERATORS[operators // 3], _OPERATORS[operators % 3]
    if right == "*":
        answer = apply_left(first, apply_right(second, third))
    else:
        answer = apply_right(apply_left(first, second), third)
    return Problem(f"What is {first} {left} {second} {right} {third}?", str(answer))


def _two_or_three_operands(number: int) -> Problem:
    return _two_operands(number) if number < _TWO else _three_operands(number - _TWO)


_OPERATORS = (("+", operator.add), ("-", operator.sub), ("*", operator.mul))
_TWO, _THREE = 3 * 40 * 40, 9 * 1000

TASKS = {
    "sort-digits": ProceduralTask(10_000, _sort_digits),
    "sums": ProceduralTask(10_000, _sum),
    "arithmetic": ProceduralTask(_TWO + _THREE, _two_or_three_operands),
    "arithmetic-2": ProceduralTask(_TWO, _two_operands),
    "arithmetic-3": ProceduralTask(_THREE, _three_operands),
}
"""The built-in tasks that live here, by name."""

ELSEWHERE = {
    "countdown": "areal.dataset.countdown",
    "shapes": "areal.dataset.shapes",
}
"""Those with a module of their own, which holds a `TASK`; it is imported when the task is asked for."""


def find_task(name: str) -> BuiltinTask | None:
    """The built-in task of that name; None if there is none."""
    if name in ELSEWHERE:
        task: BuiltinTask = import_module(ELSEWHERE[name]).TASK
        return task
    return TASKS.get(name)
