"""`builtin:shapes`: pictures of a few shapes in one colour, to be counted and named.

A picture is drawn from its number when it is asked for. Needs Pillow, which comes with matplotlib.
"""

import base64
import random
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from areal.dataset.procedural import Problem, Split, split_of

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


TASK = ShapesTask(20_000)


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
