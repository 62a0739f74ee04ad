"""The path of an image: from an SDK through the proxy to a real model, and back into the trainer's log-probs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI
from tiny_processor import POSITIONS, data_url, png, save_model

from areal.api.messages import Row
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.server import load_engine
from areal.engine.models import open_trainable
from areal.engine.training.packing import Span
from areal.proxy import Proxy
from areal.trajectory import export
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer

RED, BLUE = png("red"), png("blue")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    save_model(directory)
    return directory


def user_message(text: str, data: bytes) -> dict[str, Any]:
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": data_url(data)}}]
    return {"role": "user", "content": parts}


async def converse(directory: Path, *images: bytes) -> list[Row]:
    engine, processor = load_engine(directory), load_hf_processor(directory)
    gconfig = GenerationHyperparameters(max_new_tokens=8)
    proxy = Proxy(engine, load_hf_tokenizer(directory), gconfig=gconfig, max_positions=POSITIONS, processor=processor)
    await proxy.start()
    try:
        session = proxy.open_session()
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=proxy.http_client)
        messages: list[Any] = []
        for data in images:
            messages.append(user_message("What is this?", data))
            answer = await client.chat.completions.create(model="m", messages=messages, seed=1)
            messages.append(answer.choices[0].message.model_dump())
        return export(session.tree, "concat", 1.0)
    finally:
        await proxy.aclose()
        await engine.aclose()


def trained_logprobs(directory: Path, row: Row, images: list[bytes]) -> torch.Tensor:
    model = open_trainable(directory)
    span = Span(row.input_ids, np.flatnonzero(row.loss_mask), 0, tuple(images))
    found = torch.empty(len(span.asked))
    with torch.no_grad():
        for part in model.passes([span], 4096):
            found[part.order] = model.scores(part, torch.ones(len(span.asked)))
    return found


async def test_trainer_computes_on_the_images_that_the_engine_saw(directory: Path) -> None:
    (row,) = await converse(directory, RED, BLUE)
    assert row.images == [RED, BLUE]
    sampled = torch.from_numpy(row.logprobs[row.loss_mask])
    assert torch.allclose(trained_logprobs(directory, row, row.images), sampled, atol=1e-4)
    assert not torch.allclose(trained_logprobs(directory, row, [BLUE, RED]), sampled, atol=1e-4)
