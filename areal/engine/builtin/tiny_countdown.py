"""`builtin:tiny-countdown`: the same small Qwen3 for `builtin:countdown`, right in a third of its answers."""

import random
from collections.abc import Iterator
from itertools import cycle

from areal.dataset.countdown import TASK, CountdownProblem
from areal.dataset.procedural import Problem
from areal.engine.builtin.lessons import plain, second_try
from areal.engine.builtin.recipe import Recipe
from areal.engine.supervised import Example
from areal.reward.countdown import reaches


def lessons(seed: int) -> Iterator[Example]:
    """An endless stream of training problems: plain answers, and second tries after another way that misses."""
    draw = random.Random(seed)
    for problem in cycle(list(TASK.problems("train", seed))):
        if draw.random() < 0.75:
            yield plain(problem), None
        else:
            yield second_try(problem, _missing(problem, draw)), None


def _missing(problem: Problem, draw: random.Random) -> str:
    """The numbers in their order, joined so that they miss the target."""
    assert isinstance(problem, CountdownProblem)
    first, *others = problem.numbers
    while True:
        way = str(first) + "".join(f"{draw.choice('+-')}{number}" for number in others)
        if not _hits(way, problem):
            return way


def _hits(text: str, problem: Problem) -> bool:
    assert isinstance(problem, CountdownProblem)
    return reaches(text, problem.numbers, problem.target)


TINY_COUNTDOWN = Recipe(
    name="tiny-countdown", edition=1, lessons=lessons, task=TASK, right=_hits, answer_tokens=16, enough=0.3
)
