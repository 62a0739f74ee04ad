"""What the embedded engine does beyond what every engine does."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TINY, training_engine

from areal.api.errors import EngineError, EngineGone, RequestError, WeightMismatch
from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder), max_running=4)
    yield engine
    await engine.aclose()


def ask(**settings: Any) -> ModelRequest:
    return ModelRequest("r", [1, 2, 3], GenerationHyperparameters(**({"max_new_tokens": 8} | settings)))


async def turns(count: int = 20) -> None:
    """Give the engine's task many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_without_a_seed_differ(engine: EmbeddedEngine) -> None:
    answers = await asyncio.gather(*(engine.agenerate(ask(max_new_tokens=20)) for _ in range(4)))
    assert len({tuple(answer.output_tokens) for answer in answers}) == 4


async def test_a_pause_holds_from_the_moment_it_is_asked_for(engine: EmbeddedEngine) -> None:
    await engine.agenerate(ask())
    await turns()  # the engine's task waits for work
    drawn = engine.tokens_generated
    task = asyncio.create_task(engine.agenerate(ask()))
    await asyncio.sleep(0)  # the request is in, and the engine's task is about to run
    await engine.pause()
    await turns()
    assert engine.tokens_generated == drawn
    await engine.resume()
    assert (await task).output_len == 8


async def test_more_requests_than_rows_take_turns(engine: EmbeddedEngine) -> None:
    tasks = [asyncio.create_task(engine.agenerate(ask(max_new_tokens=2 + i))) for i in range(11)]
    most = 0
    while not all(task.done() for task in tasks):
        health = await engine.health()
        most = max(most, health.running)
        await asyncio.sleep(0)
    assert most == 4
    assert [(await task).output_len for task in tasks] == [2 + i for i in range(11)]


async def test_weights_without_their_digest_are_refused_and_change_nothing(engine: EmbeddedEngine) -> None:
    trainer = training_engine(seed=2)
    trainer.version = 1
    update = trainer.publish()
    before = await engine.agenerate(ask(seed=1))
    with pytest.raises(WeightMismatch, match=r"version 1 in .* must have the digest 0{32}, got "):
        await engine.update_weights(replace(update, digest="0" * 32))
    assert (await engine.agenerate(ask(seed=1))).output_tokens == before.output_tokens
    assert (await engine.health()).version == 0
    await engine.update_weights(update)
    assert (await engine.agenerate(ask(seed=1))).output_tokens != before.output_tokens
    trainer.close()


async def test_weights_that_cannot_be_read_are_refused(engine: EmbeddedEngine, tmp_path: Path) -> None:
    trainer = training_engine(replace(TINY, num_layers=1))
    update = trainer.publish()
    with pytest.raises(WeightMismatch, match=r"must have model\.layers\.1\..* got no such tensor"):
        await engine.update_weights(update)
    with pytest.raises(WeightMismatch, match=r"must be a safetensors file .*gone"):
        await engine.update_weights(replace(update, path=str(tmp_path / "gone")))
    assert (await engine.agenerate(ask())).output_len == 8
    trainer.close()


async def test_stop_texts_without_a_tokenizer_are_refused(engine: EmbeddedEngine) -> None:
    with pytest.raises(RequestError, match="use stop_token_ids"):
        await engine.agenerate(ask(stop=["x"]))


async def test_activity_is_reported_once_and_only_where_tokens_were_drawn(engine: EmbeddedEngine) -> None:
    assert engine.activity() == []
    await engine.agenerate(ask())
    intervals = engine.activity()
    assert intervals
    assert all(start < end for start, end in intervals)
    assert engine.activity() == []
    task = asyncio.create_task(engine.agenerate(ask()))
    await asyncio.sleep(0)
    task.cancel()
    await turns()
    assert engine.activity() == []


class BrokenRunner(DecoderRunner):
    def forward(self, ids: Any, positions: Any, pieces: Any) -> Any:
        raise RuntimeError("out of memory")


async def test_a_step_that_fails_fails_every_call_with_its_reason() -> None:
    engine = EmbeddedEngine(BrokenRunner(training_engine().decoder))
    outcomes = await asyncio.gather(*(engine.agenerate(ask()) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineGone] * 3
    with pytest.raises(EngineError, match=r"the engine failed: RuntimeError.*out of memory"):
        await engine.health()
    await engine.aclose()
