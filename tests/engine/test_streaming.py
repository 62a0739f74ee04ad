"""Answers while they are drawn, on every engine."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from engine_kinds import LONG, Engines, answer, ask, begin, patience, soon, until

from areal.api.engine_api import InferenceEngine
from areal.api.errors import ContextLengthError, EngineError
from areal.api.io_struct import TokenChunk

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def stream(engine: InferenceEngine, *args: Any, **settings: Any) -> list[TokenChunk]:
    return await rest(engine.astream(ask(*args, **settings)))


async def rest(chunks: AsyncGenerator[TokenChunk, None]) -> list[TokenChunk]:
    async with patience(), aclosing(chunks):
        return [chunk async for chunk in chunks]


async def test_chunks_join_to_the_answer_that_a_plain_call_gives(engine: InferenceEngine) -> None:
    whole = await answer(engine, seed=3, max_new_tokens=40)
    chunks = await stream(engine, seed=3, max_new_tokens=40)
    response = chunks[-1].response
    assert response is not None
    assert response.output_tokens == whole.output_tokens
    assert response.stop_reason == whole.stop_reason
    assert [token for chunk in chunks for token in chunk.tokens] == response.output_tokens
    assert [number for chunk in chunks for number in chunk.logprobs] == response.output_logprobs
    assert [version for chunk in chunks for version in chunk.versions] == response.output_versions
    assert all(chunk.response is None for chunk in chunks[:-1])


async def test_tokens_arrive_before_the_answer_is_finished(engine: InferenceEngine) -> None:
    async with patience(), aclosing(engine.astream(ask(max_new_tokens=LONG, seed=1))) as chunks:
        first = await anext(chunks)
        assert first.response is None
        assert 0 < len(first.tokens) < LONG
        await engine.pause()
        assert (await engine.health()).running == 1
        await engine.resume()
        assert [chunk async for chunk in chunks][-1].response is not None


async def test_an_answer_of_one_token_is_one_chunk(engine: InferenceEngine) -> None:
    (chunk,) = await stream(engine, max_new_tokens=1)
    assert chunk.response is not None
    assert chunk.tokens == chunk.response.output_tokens
    assert len(chunk.tokens) == 1


async def test_closing_a_stream_aborts_its_generation_and_no_other(engine: InferenceEngine) -> None:
    (kept,) = await begin(engine, max_new_tokens=LONG)
    chunks = engine.astream(ask([6], max_new_tokens=LONG, seed=2))
    await soon(anext(chunks))
    await engine.pause()
    await until(engine, running=2)
    await chunks.aclose()
    await until(engine, running=1, waiting=0)
    await engine.resume()
    assert (await soon(kept)).output_len == LONG
    await until(engine, running=0, waiting=0)


async def test_a_cancelled_reader_aborts_its_generation(engine: InferenceEngine) -> None:
    reading = asyncio.create_task(stream(engine, max_new_tokens=LONG))
    await until(engine, running=1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(engine, running=0, waiting=0)


async def test_a_stream_closed_before_its_first_token_leaves_the_queue(engine: InferenceEngine) -> None:
    await engine.pause()
    reading = asyncio.create_task(stream(engine))
    await until(engine, waiting=1)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(engine, running=0, waiting=0)
    await engine.resume()


async def test_streams_and_plain_calls_share_the_engine(engine: InferenceEngine) -> None:
    plain = [await answer(engine, [7, number], seed=number, max_new_tokens=20) for number in range(12)]
    streams = await soon(
        asyncio.gather(*(stream(engine, [7, number], seed=number, max_new_tokens=20) for number in range(12)))
    )
    joined = [[token for chunk in chunks for token in chunk.tokens] for chunks in streams]
    assert joined == [each.output_tokens for each in plain]


async def test_new_weights_show_in_the_chunks_after_them(engines: Engines, engine: InferenceEngine) -> None:
    await engine.update_weights(old := engines.publish())
    async with patience(), aclosing(engine.astream(ask(max_new_tokens=LONG, seed=1))) as chunks:
        versions = [*(await anext(chunks)).versions]
        await engine.update_weights(new := engines.publish())
        async for chunk in chunks:
            versions += chunk.versions
    assert set(versions) == {old.version, new.version}
    assert versions == sorted(versions)


async def test_a_stream_that_cannot_be_served_is_refused_like_a_call(engine: InferenceEngine) -> None:
    with pytest.raises(ContextLengthError, match="4096 positions"):
        await stream(engine, [1] * 4000, max_new_tokens=97)
    await until(engine, running=0, waiting=0)


async def test_closing_the_engine_fails_its_streams(engines: Engines) -> None:
    engine = await engines.open()
    chunks = engine.astream(ask(max_new_tokens=LONG))
    await soon(anext(chunks))
    await engine.aclose()
    with pytest.raises(EngineError):
        await rest(chunks)
