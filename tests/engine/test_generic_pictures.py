"""Requests with pictures: what cannot be shown is refused alone, before it can hurt others."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from generic_models import picture_ids, pictures, write_gpt2, write_llava
from tiny_models import write_model

from areal.api.errors import RequestError
from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.server import load_engine
from areal.engine.transformers import images as picture_inputs
from areal.engine.transformers.images import PictureInputs

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
async def test_places_and_pictures_must_match(engine: EmbeddedEngine, llava: Path, places: int, images: int) -> None:
    ids = [20, *picture_ids(llava) * places, 30]
    with pytest.raises(
        RequestError, match=f"{images} pictures need {16 * images} placeholder tokens, .* {16 * places}"
    ):
        await engine.agenerate(request(ids, *pictures(8)[:images]))
    assert (await engine.agenerate(request([20, *picture_ids(llava), 30], pictures(8)[0]))).output_len


async def test_what_is_no_picture_is_refused(engine: EmbeddedEngine, llava: Path) -> None:
    with pytest.raises(RequestError, match="an image must"):
        await engine.agenerate(request([20, *picture_ids(llava), 30], b"no picture"))
    with pytest.raises(RequestError, match="must be whole"):
        await engine.agenerate(request([20, *picture_ids(llava), 30], pictures(8)[0][:-30]))


@pytest.mark.parametrize("write", [write_model, write_gpt2])
async def test_a_model_without_eyes_refuses_pictures(tmp_path: Path, write: object) -> None:
    engine = load_engine(write(tmp_path))  # type: ignore[operator]
    with pytest.raises(RequestError, match="sees no pictures"):
        await engine.agenerate(request([20, 30], pictures(8)[0]))
    await engine.aclose()


def test_the_same_pictures_are_read_once_and_the_oldest_forgotten(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = PictureInputs(llava, {picture_ids(llava)[0]})
    first = inputs.of((pictures(8)[0],))
    assert inputs.of((bytes(bytearray(pictures(8)[0])),)) is first
    monkeypatch.setattr(picture_inputs, "REMEMBERED_BYTES", 2 * first.bytes)
    for picture in pictures(8)[1:3]:
        inputs.of((picture,))
    assert inputs.of((pictures(8)[0],)) is not first
