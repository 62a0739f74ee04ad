"""Built-in tasks, each a chat with `messages` and an `answer`; `builtin:NAME` names one of TASKS.

A task is a numbered space of problems. A hash of a problem's content decides which split it belongs to, so splits are
disjoint whatever their size, and no arithmetic on the number can skew them.
"""

import base64
import functools
import hashlib
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import combinations_with_replacement, product
from typing import Any, Generic, Literal, Protocol, TypeVar

from areal.api.errors import DatasetError
from areal.utils.installing import missing

Split = Literal["train", "valid", "test"]
SPLITS: dict[Split, range] = {"test": range(0, 20), "valid": range(20, 30), "train": range(30, 100)}
"""Percentiles of the hash that each split takes."""


class Posable(Protocol):
    """A problem that can be posed as a task."""

    @property
    def split_key(self) -> str:
        """The text whose hash decides the split."""
        ...

    def as_task(self) -> dict[str, Any]: ...


P = TypeVar("P", bound=Posable, covariant=True)


@dataclass(frozen=True)
class ProceduralTask(Generic[P]):
    size: int
    """Problems are numbered 0 … size - 1."""
    problem: Callable[[int], P]
    """The problem with a given number."""

    def problems(self, split: Split, seed: int = 0) -> Iterator[P]:
        """Every problem of a split, in an order drawn from `seed`."""
        order = list(range(self.size))
        random.Random(seed).shuffle(order)
        return (problem for problem in map(self.problem, order) if split_of(problem) == split)


def split_of(problem: Posable) -> Split:
    percentile = int.from_bytes(hashlib.blake2b(problem.split_key.encode(), digest_size=8).digest()) % 100
    return next(split for split, share in SPLITS.items() if percentile in share)


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str

    @property
    def split_key(self) -> str:
        return self.question

    def as_task(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": self.question}], "answer": self.answer}


_OPERATORS = (("+", operator.add), ("-", operator.sub), ("*", operator.mul))
_TWO_OPERANDS, _THREE_OPERANDS = 3 * 40 * 40, 9 * 1000


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
    return _two_operands(number) if number < _TWO_OPERANDS else _three_operands(number - _TWO_OPERANDS)


_COUNTDOWN_NUMBERS = 3
_COUNTDOWN_LARGEST = 20
_COUNTDOWN_SIZE = 5740


@dataclass(frozen=True)
class CountdownProblem(Problem):
    """Reach a target with three numbers from 1 to 20, each used once: `Make 13 from 4 8 17` → `4-8+17`.

    Most targets can be reached in several ways, so the task carries `numbers` and `target`, with which
    `areal.reward.countdown_reward` accepts any of them; `answer` is one of the ways, with + and - only.
    """

    numbers: tuple[int, ...]
    target: int

    def as_task(self) -> dict[str, Any]:
        return {**super().as_task(), "numbers": list(self.numbers), "target": self.target}


def _countdown(number: int) -> CountdownProblem:
    return _countdown_problems()[number]


@functools.cache
def _countdown_problems() -> tuple[CountdownProblem, ...]:
    """Every choice of numbers with every target that it reaches."""
    problems = []
    for numbers in combinations_with_replacement(range(1, _COUNTDOWN_LARGEST + 1), _COUNTDOWN_NUMBERS):
        reached: set[int] = set()
        for signs in product((1, -1), repeat=_COUNTDOWN_NUMBERS):
            target = sum(sign * number for sign, number in zip(signs, numbers, strict=True))
            if target >= 0 and target not in reached:
                reached.add(target)
                question = f"Make {target} from {' '.join(map(str, numbers))}"
                problems.append(CountdownProblem(question, _expression(numbers, signs), numbers, target))
    return tuple(problems)


def _expression(numbers: tuple[int, ...], signs: tuple[int, ...]) -> str:
    """Begins with the first number that is added; the others follow in their order."""
    terms = [f"{'+' if sign > 0 else '-'}{number}" for sign, number in zip(signs, numbers, strict=True)]
    terms.insert(0, terms.pop(signs.index(1)))
    return "".join(terms).removeprefix("+")


SHAPES_QUESTION = "How many shapes, and in which colour?"
COLOURS = {
    "red": (220, 50, 40),
    "green": (50, 160, 70),
    "blue": (50, 90, 220),
    "yellow": (240, 200, 40),
    "purple": (150, 60, 180),
    "black": (20, 20, 20),
}
BACKGROUND = (245, 245, 245)
IMAGE_SIZE = 32
"""Pixels on a side."""
_KINDS = ("circle", "square", "triangle", "cross")
_CELL = IMAGE_SIZE // 2
"""Each shape has a quarter of the image to itself and does not fill it, so neighbours never touch."""


@dataclass(frozen=True)
class Drawing:
    """An image of a few shapes in one colour, to be counted and named.

    It is drawn when it is asked for, with Pillow, which comes with matplotlib.
    """

    colour: str
    kind: str
    places: tuple[tuple[int, int, int], ...]
    """Centre and radius of each shape."""

    @classmethod
    def numbered(cls, number: int) -> "Drawing":
        draw = random.Random(f"shapes {number}")
        quarters = sorted(draw.sample(range(4), draw.randint(1, 4)))
        colour, kind = draw.choice(list(COLOURS)), draw.choice(_KINDS)
        return cls(colour, kind, tuple(_place(quarter, draw) for quarter in quarters))

    @property
    def split_key(self) -> str:
        return f"Drawing(colour={self.colour!r}, kind={self.kind!r}, places={self.places!r})"

    @property
    def answer(self) -> str:
        return f"{len(self.places)} {self.colour}"

    def png(self) -> bytes:
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise DatasetError(missing("builtin:shapes draws its images with Pillow", error, "vision")) from error
        image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), BACKGROUND)
        pen = ImageDraw.Draw(image)
        for place in self.places:
            _draw(pen, self.kind, *place, COLOURS[self.colour])
        buffer = BytesIO()
        image.save(buffer, format="PNG")
        return buffer.getvalue()

    def as_task(self) -> dict[str, Any]:
        """The image is a data URL, in the form that OpenAI's chat API has for it."""
        url = "data:image/png;base64," + base64.b64encode(self.png()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": SHAPES_QUESTION}]
        return {"messages": [{"role": "user", "content": content}], "answer": self.answer}


def _place(quarter: int, draw: random.Random) -> tuple[int, int, int]:
    radius = draw.randint(4, 6)
    x, y = (draw.randint(radius, _CELL - 2 - radius) for _ in range(2))
    return quarter % 2 * _CELL + x, quarter // 2 * _CELL + y, radius


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


COUNTDOWN = ProceduralTask(_COUNTDOWN_SIZE, _countdown)
SHAPES = ProceduralTask(20_000, Drawing.numbered)

TASKS: dict[str, ProceduralTask[Any]] = {
    "sort-digits": ProceduralTask(10_000, _sort_digits),
    "sums": ProceduralTask(10_000, _sum),
    "arithmetic": ProceduralTask(_TWO_OPERANDS + _THREE_OPERANDS, _two_or_three_operands),
    "arithmetic-2": ProceduralTask(_TWO_OPERANDS, _two_operands),
    "arithmetic-3": ProceduralTask(_THREE_OPERANDS, _three_operands),
    "countdown": COUNTDOWN,
    "shapes": SHAPES,
}
"""The built-in tasks, by name."""
