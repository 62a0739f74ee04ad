"""What the shipped fake engine offers to tests beyond the promises of every engine."""

import asyncio
from collections.abc import Sequence

import pytest

from areal.api.errors import EngineError
from areal.api.io_struct import Grammar, ModelRequest, TokenChunk
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.fake import FakeEngine


def request(*ids: int) -> ModelRequest:
    return ModelRequest("r", list(ids), GenerationHyperparameters(max_new_tokens=8))


def say_123(ids: Sequence[int]) -> list[int]:
    return [1, 2, 3]


async def test_held_request_waits_until_it_is_released() -> None:
    engine = FakeEngine(script=say_123, hold=asyncio.Event())
    task = asyncio.create_task(engine.agenerate(request(5)))
    await engine.until_in_flight(1)
    assert (await engine.health()).waiting == 1
    assert engine.hold is not None
    engine.hold.set()
    assert (await task).output_tokens == [1, 2, 3]
    assert engine.in_flight == 0
    assert [req.input_ids for req in engine.requests] == [[5]]


async def test_stream_is_held_and_fails_between_two_tokens() -> None:
    engine = FakeEngine(script=say_123, hold=asyncio.Event(), failure=EngineError("it died"), interrupt_at=2)
    stream = engine.astream(request(5))
    seen = [await anext(stream), await anext(stream)]
    last = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not last.done()
    assert engine.hold is not None
    engine.hold.set()
    with pytest.raises(EngineError, match="it died"):
        await last
    assert [chunk.tokens for chunk in seen] == [[1], [2]]
    assert engine.in_flight == 0


async def test_cancelled_request_leaves_the_hold() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    task = asyncio.create_task(engine.agenerate(request(5)))
    await engine.until_in_flight(1)
    task.cancel()
    await engine.until_in_flight(0)


async def test_closing_ends_held_requests() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    task = asyncio.create_task(engine.agenerate(request(5)))
    await engine.until_in_flight(1)
    await engine.aclose()
    with pytest.raises(EngineError, match="closed"):
        await task


async def test_failure_may_choose_its_requests() -> None:
    engine = FakeEngine(script=say_123, failure=lambda req: EngineError("no fives") if 5 in req.input_ids else None)
    assert (await engine.agenerate(request(4))).output_tokens == [1, 2, 3]
    with pytest.raises(EngineError, match="no fives"):
        await engine.agenerate(request(5))


async def test_empty_script_is_an_answer_without_tokens() -> None:
    engine = FakeEngine(script=lambda ids: [])
    chunks: list[TokenChunk] = [chunk async for chunk in engine.astream(request(5))]
    assert [chunk.tokens for chunk in chunks] == [[]]
    assert chunks[0].response is not None
    assert chunks[0].response.output_tokens == []


async def test_unconstrained_engine_ignores_grammars() -> None:
    req = request(5)
    req.grammar = Grammar("json_schema", '{"type": "boolean"}')
    assert (await FakeEngine(script=say_123, constrained=False).agenerate(req)).output_tokens == [1, 2, 3]
