"""`builtin:countdown`: reach a target with the given numbers, each used once: `Make 13 from 4 8 17` → `4-8+17`.

Three numbers from 1 to 20, joined by + and -. Most targets can be reached in several ways, so a task carries `numbers`
and `target` for `areal.reward.countdown_reward` to check any of them; `answer` is one of the ways.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from typing import Any

from areal.dataset.procedural import Problem, ProceduralTask

COUNT = 3
LARGEST = 20


@dataclass(frozen=True)
class CountdownProblem(Problem):
    numbers: tuple[int, ...]
    target: int

    def as_task(self) -> dict[str, Any]:
        return {**super().as_task(), "numbers": list(self.numbers), "target": self.target}


def _problems() -> Iterator[CountdownProblem]:
    """Every choice of numbers with every target that it reaches."""
    for numbers in combinations_with_replacement(range(1, LARGEST + 1), COUNT):
        reached: set[int] = set()
        for signs in product((1, -1), repeat=COUNT):
            target = sum(sign * number for sign, number in zip(signs, numbers, strict=True))
            if target >= 0 and target not in reached:
                reached.add(target)
                yield _posed(numbers, signs, target)


def _posed(numbers: tuple[int, ...], signs: tuple[int, ...], target: int) -> CountdownProblem:
    """The answer begins with the first number that is added; the others follow in their order."""
    terms = [f"{'+' if sign > 0 else '-'}{number}" for sign, number in zip(signs, numbers, strict=True)]
    terms.insert(0, terms.pop(signs.index(1)))
    question = f"Make {target} from {' '.join(map(str, numbers))}"
    return CountdownProblem(question, "".join(terms).removeprefix("+"), numbers, target)


_SPACE = tuple(_problems())

TASK = ProceduralTask(len(_SPACE), _SPACE.__getitem__)
