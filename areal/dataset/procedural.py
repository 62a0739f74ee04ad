"""Built-in tasks, posed as chat `messages` with an `answer`.

A task is a numbered space of problems. Which split a problem belongs to is decided by a hash of its text, so splits are
disjoint whatever their size, and no arithmetic on the number can skew them.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "valid", "test"]
SPLITS: dict[Split, range] = {"test": range(0, 20), "valid": range(20, 30), "train": range(30, 100)}
"""Percentiles of the hash that each split takes."""


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


TASKS = {
    "sort-digits": ProceduralTask(10_000, _sort_digits),
    "sums": ProceduralTask(10_000, _sum),
}
"""The built-in tasks by name."""
