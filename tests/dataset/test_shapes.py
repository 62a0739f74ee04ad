"""Images of shapes: the answer is what is drawn, and held-out images are never trained on."""

import base64
from io import BytesIO
from itertools import islice

import pytest
from PIL import Image

from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.builtin import BACKGROUND, COLOURS, SHAPES, Drawing


def islands(image: Image.Image) -> tuple[int, set[tuple[int, ...]]]:
    """How many connected areas are not background, and their colours."""
    left = {(x, y) for x in range(image.width) for y in range(image.height) if image.getpixel((x, y)) != BACKGROUND}
    colours = {image.getpixel(place) for place in left}
    count = 0
    while left:
        count += 1
        front = [left.pop()]
        while front:
            x, y = front.pop()
            near = {(x + dx, y + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)} & left
            left -= near
            front += near
    return count, colours


@pytest.mark.parametrize("number", range(40))
def test_the_answer_is_what_the_image_shows(number: int) -> None:
    drawing = Drawing.numbered(number)
    count, colours = islands(Image.open(BytesIO(drawing.png())))
    assert drawing.answer == f"{count} {drawing.colour}"
    assert colours == {COLOURS[drawing.colour]}


def test_a_task_is_a_chat_message_with_a_data_url() -> None:
    task = get_custom_dataset("test", DatasetConfig(path="builtin:shapes", size=3))[0]
    image, question = task["messages"][0]["content"]
    head, _, body = image["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(BytesIO(base64.b64decode(body))).size == (32, 32)
    assert question["text"].endswith("?")


@pytest.mark.slow
def test_no_drawing_is_in_two_splits() -> None:
    train, valid, test = (set(SHAPES.problems(split)) for split in ("train", "valid", "test"))
    assert not train & valid
    assert not train & test
    assert not valid & test
    assert len(test) > 2000


def test_every_answer_comes_up_and_a_seed_orders_them() -> None:
    drawings = list(islice(SHAPES.problems("train", seed=1), 1000))
    assert {each.answer for each in drawings} == {f"{count} {colour}" for count in range(1, 5) for colour in COLOURS}
    assert drawings == list(islice(SHAPES.problems("train", seed=1), 1000))
    assert drawings != list(islice(SHAPES.problems("train", seed=2), 1000))
