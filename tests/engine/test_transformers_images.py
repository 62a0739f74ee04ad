"""Requests with images: one that the model cannot take is refused alone, before it can hurt others."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tiny_models import write_model
from transformers_models import drawn_images, image_ids, write_gpt2, write_llava

from areal.api.errors import RequestError
from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.server import load_engine
from areal.engine.transformers import images as images_module
from areal.engine.transformers.images import ImageInputs

pytestmark = pytest.mark.slow

GREEDY = GenerationHyperparameters(max_new_tokens=3, greedy=True)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest_asyncio.fixture
async def engine(llava: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = load_engine(llava)
    yield engine
    await engine.aclose()


def request(ids: list[int], *images: bytes) -> ModelRequest:
    return ModelRequest("r", ids, GREEDY, images=list(images))


@pytest.mark.parametrize(("places", "images"), [(0, 1), (1, 0), (1, 2), (3, 2)])
async def test_placeholders_and_images_must_match(
    engine: EmbeddedEngine, llava: Path, places: int, images: int
) -> None:
    ids = [20, *image_ids(llava) * places, 30]
    with pytest.raises(RequestError, match=f"{images} images need {16 * images} placeholder tokens, .* {16 * places}"):
        await engine.agenerate(request(ids, *drawn_images(8)[:images]))
    assert (await engine.agenerate(request([20, *image_ids(llava), 30], drawn_images(8)[0]))).output_len


async def test_bytes_that_are_no_image_are_refused(engine: EmbeddedEngine, llava: Path) -> None:
    with pytest.raises(RequestError, match="an image must"):
        await engine.agenerate(request([20, *image_ids(llava), 30], b"no image"))
    with pytest.raises(RequestError, match="must be whole"):
        await engine.agenerate(request([20, *image_ids(llava), 30], drawn_images(8)[0][:-30]))


@pytest.mark.parametrize("write", [write_model, write_gpt2])
async def test_a_text_model_refuses_images(tmp_path: Path, write: object) -> None:
    engine = load_engine(write(tmp_path))  # type: ignore[operator]
    with pytest.raises(RequestError, match="takes no images, the request has 1"):
        await engine.agenerate(request([20, 30], drawn_images(8)[0]))
    await engine.aclose()


def test_the_same_images_are_prepared_once_and_the_oldest_dropped(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = ((image,) for image in drawn_images(8)[:3])
    size = ImageInputs(llava, {image_ids(llava)[0]}).of(one).bytes
    monkeypatch.setattr(images_module, "CACHED_BYTES", 2 * size)
    inputs = ImageInputs(llava, {image_ids(llava)[0]})
    first = inputs.of(one)
    assert inputs.of((bytes(bytearray(one[0])),)) is first
    inputs.of(two)
    assert inputs.of(one) is first
    for images in (two, three):
        inputs.of(images)
    assert inputs.of(one) is not first
