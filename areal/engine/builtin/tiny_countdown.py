"""`builtin:tiny-countdown`: the same small Qwen3 for `builtin:countdown`, right in a third of its answers."""

from collections.abc import Iterator
from itertools import cycle

from areal.dataset.countdown import TASK, CountdownProblem
from areal.dataset.procedural import Problem
from areal.engine.builtin.lessons import plain
from areal.engine.builtin.recipe import Recipe
from areal.engine.supervised import Example
from areal.reward.countdown import reaches


def lessons(seed: int) -> Iterator[Example]:
    """An endless stream of training problems, each with one of its answers."""
    for problem in cycle(list(TASK.problems("train", seed))):
        yield plain(problem), None


def _reaches_target(text: str, problem: Problem) -> bool:
    assert isinstance(problem, CountdownProblem)
    return reaches(text, problem.numbers, problem.target)


TINY_COUNTDOWN = Recipe(
    name="tiny-countdown", edition=1, lessons=lessons, task=TASK, right=_reaches_target, answer_tokens=16, enough=0.3
)
