"""Built-in tasks, posed as chat `messages` with an `answer`.

A task is a numbered space of problems. Which split a problem belongs to is decided by a hash of its text, so splits are
disjoint whatever their size, and no arithmetic on the number can skew them.
"""

# MERGED-DOC
# `builtin:countdown`: reach a target with the given numbers, each used once: `Make 13 from 4 8 17` → `4-8+17`.
#
# Three numbers from 1 to 20, joined by + and -. Most targets can be reached in several ways, so a task carries `numbers`
# and `target` for `areal.reward.countdown_reward` to check any of them; `answer` is one of the ways.
# `builtin:shapes`: pictures of a few shapes in one colour, to be counted and named.
#
# A picture is drawn from its number when it is asked for. Needs Pillow, which comes with matplotlib.

import base64
import hashlib
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import combinations_with_replacement, product
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

ELSEWHERE = ("countdown", "shapes")


def find_task(name: str) -> BuiltinTask | None:
    """The built-in task of that name; None if there is none."""
    if name == "countdown":
        return COUNTDOWN
    if name == "shapes":
        return SHAPES
    return TASKS.get(name)


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

COUNTDOWN = ProceduralTask(len(_SPACE), _SPACE.__getitem__)


QUESTION = "How many shapes, and in which colour?"
COLOURS = {
    "red": (220, 50, 40),
    "green": (50, 160, 70),
    "blue": (50, 90, 220),
    "yellow": (240, 200, 40),
    "purple": (150, 60, 180),
    "black": (20, 20, 20),
}
KINDS = ("circle", "square", "triangle", "cross")
PAPER = (245, 245, 245)
SIZE = 32
"""Pixels on a side."""
CELL = SIZE // 2
"""Each shape lies in a quarter of its own, which it does not fill: neighbours never touch."""


@dataclass(frozen=True)
class Drawing:
    colour: str
    kind: str
    places: tuple[tuple[int, int, int], ...]
    """Centre and radius of each shape."""

    @classmethod
    def numbered(cls, number: int) -> "Drawing":
        draw = random.Random(f"shapes {number}")
        quarters = sorted(draw.sample(range(4), draw.randint(1, 4)))
        return cls(draw.choice(list(COLOURS)), draw.choice(KINDS), tuple(_place(quarter, draw) for quarter in quarters))

    @property
    def answer(self) -> str:
        return f"{len(self.places)} {self.colour}"

    def png(self) -> bytes:
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (SIZE, SIZE), PAPER)
        pen = ImageDraw.Draw(image)
        for place in self.places:
            _draw(pen, self.kind, *place, COLOURS[self.colour])
        buffer = BytesIO()
        image.save(buffer, format="PNG")
        return buffer.getvalue()

    def as_task(self) -> dict[str, Any]:
        """The picture as a data URL in the form that OpenAI's chat API has for it."""
        url = "data:image/png;base64," + base64.b64encode(self.png()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        return {"messages": [{"role": "user", "content": content}], "answer": self.answer}


@dataclass(frozen=True)
class ShapesTask:
    size: int
    """Drawings are numbered 0 … size - 1."""

    def problems(self, split: Split, seed: int = 0) -> Iterator[Drawing]:
        """Every drawing of a split, in an order drawn from `seed`; the same drawing is always in the same split."""
        order = list(range(self.size))
        random.Random(seed).shuffle(order)
        return (each for each in map(Drawing.numbered, order) if split_of(Problem(repr(each), each.answer)) == split)


SHAPES = ShapesTask(20_000)


def _place(quarter: int, draw: random.Random) -> tuple[int, int, int]:
    radius = draw.randint(4, 6)
    x, y = (draw.randint(radius, CELL - 2 - radius) for _ in range(2))
    return quarter % 2 * CELL + x, quarter // 2 * CELL + y, radius


def _draw(pen: Any, kind: str, x: int, y: int, radius: int, fill: tuple[int, int, int]) -> None:
    left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    if kind == "circle":
        pen.ellipse((left, top, right, bottom), fill=fill)
    elif kind == "square":
        pen.rectangle((left, top, right, bottom), fill=fill)
    elif kind == "triangle":
        pen.polygon([(x, top), (left, bottom), (right, bottom)], fill=fill)
    else:
        pen.rectangle((left, y - 1, right, y + 1), fill=fill)
        pen.rectangle((x - 1, top, x + 1, bottom), fill=fill)
