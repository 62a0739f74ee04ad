"""Answers of an engine over a channel: callers that leave, connections that end, and what was drawn by then."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_kinds import ask, soon, until
from tiny_models import byte_tokenizer, training_engine

from areal.api.errors import EngineGone, RequestError
from areal.api.io_struct import ModelRequest
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.remote import RemoteEngine, worker_handlers
from areal.infra.rpc.channel import Channel
from areal.infra.rpc.connect import connect, serve
from areal.infra.rpc.wire import api_wire

pytestmark = pytest.mark.slow

MOMENTS = 24
"""Turns of the event loop: more than a short answer takes from its request to its end."""


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[EmbeddedEngine, str, list[Channel]]]:
    """An engine, its address, and the channels on which it is asked."""
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder), byte_tokenizer(), max_running=8)
    channels: list[Channel] = []

    def welcome(channel: Channel) -> None:
        channels.append(channel)
        channel.handlers.update(worker_handlers(engine, channel))

    listener = await serve(f"unix:{directory}/socket", welcome, wire=api_wire())
    try:
        yield engine, listener.address, channels
    finally:
        await listener.close()
        await engine.aclose()


async def dialled(address: str) -> RemoteEngine:
    return RemoteEngine(await connect(address, wire=api_wire(), peer="the engine"))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def request(number: int) -> ModelRequest:
    return ask([5 + number % 7, *range(1, 2 + number % 4)], max_new_tokens=1 + number % 5, seed=number)


async def test_the_answer_has_the_prompt_that_did_not_travel_back(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, address, _):
        remote, asked = await dialled(address), request(3)
        answer = await soon(remote.agenerate(asked))
        assert answer == await soon(engine.agenerate(asked))
        answer.input_tokens.append(0)
        assert asked.input_ids == request(3).input_ids
        await remote.aclose()


async def test_a_request_that_is_refused_says_why(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, address, _):
        remote = await dialled(address)
        with pytest.raises(RequestError, match="input_ids must lie in"):
            await soon(remote.agenerate(ask([10**6])))
        await remote.aclose()


async def test_callers_that_leave_at_any_moment_leave_nothing_behind(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, address, _):
        remote = await dialled(address)
        expected = [await soon(remote.agenerate(request(number))) for number in range(8)]
        for moment in range(MOMENTS):
            calls = [asyncio.ensure_future(remote.agenerate(request(number))) for number in range(8)]
            await turns(moment)
            for call in calls[::2]:
                call.cancel()
            outcomes = await soon(asyncio.gather(*calls, return_exceptions=True))
            for outcome, answer in zip(outcomes, expected, strict=True):
                assert isinstance(outcome, asyncio.CancelledError) or outcome == answer
            assert outcomes[1::2] == expected[1::2]
            await until(engine, running=0, waiting=0)
        await remote.aclose()


async def test_connections_that_end_at_any_moment_leave_nothing_behind(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, address, channels):
        expected = [await soon(engine.agenerate(request(number))) for number in range(8)]
        for moment in range(MOMENTS):
            remote = await dialled(address)
            calls = [asyncio.ensure_future(remote.agenerate(request(number))) for number in range(8)]
            await turns(moment)
            await (remote.channel if moment % 2 else channels[-1]).close()
            outcomes = await soon(asyncio.gather(*calls, return_exceptions=True))
            for outcome, answer in zip(outcomes, expected, strict=True):
                assert isinstance(outcome, EngineGone) or outcome == answer
            await until(engine, running=0, waiting=0)
            await remote.aclose()


async def test_what_was_drawn_before_the_connection_ended_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.engine.inference.remote.GATHER_SECONDS", 0.001)
    async with served(tmp_path) as (engine, address, channels):
        asked = ask([1, 2, 3], max_new_tokens=100, seed=7)
        whole = await soon(engine.agenerate(asked))
        remote = await dialled(address)
        call = asyncio.ensure_future(remote.agenerate(asked))
        await turns(1)
        (inbox,) = remote._streams.values()
        await soon(inbox.arrived.wait())
        await channels[-1].close()
        with pytest.raises(EngineGone) as gone:
            await soon(call)
        drawn = gone.value.drawn
        assert 0 < len(drawn.tokens) < 100
        assert drawn.tokens == whole.output_tokens[: len(drawn.tokens)]
        assert set(drawn.versions) == set(drawn.digests) == {0}
        await remote.aclose()
        again = await dialled(address)
        resumed = await soon(again.agenerate(ModelRequest("r", [1, 2, 3], asked.gconfig, drawn=drawn)))
        assert resumed.output_tokens == whole.output_tokens
        await again.aclose()
