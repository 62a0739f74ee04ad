"""Of a prompt that goes on from an earlier one only what is new travels, and the engine gets the whole of it."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.fake import FakeEngine
from areal.engine.inference.remote import RemoteEngine, worker_handlers
from areal.infra.rpc.channel import Channel
from areal.infra.rpc.connect import connect, serve
from areal.infra.rpc.wire import api_wire

GCONFIG = GenerationHyperparameters(max_new_tokens=2)


class Engine(FakeEngine):
    """Knows how many ids have come over its channels, and the ids that it was asked with."""

    def __init__(self) -> None:
        super().__init__(max_positions=1 << 20)
        self.received = 0

    def welcome(self, channel: Channel) -> None:
        handlers = worker_handlers(self, channel)

        def counted(verb: str) -> Any:
            def handler(stream: int, req: ModelRequest, *how: Any) -> Any:
                self.received += len(req.input_ids)
                return handlers[verb](stream, req, *how)

            return handler

        channel.handlers.update(handlers | {verb: counted(verb) for verb in ("agenerate", "astream")})


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[Engine, str]]:
    engine = Engine()
    listener = await serve(f"unix:{directory}/socket", engine.welcome, wire=api_wire())
    try:
        yield engine, listener.address
    finally:
        await listener.close()


async def dialled(address: str) -> RemoteEngine:
    return RemoteEngine(await connect(address, wire=api_wire(), peer="the engine"))


def ask(ids: list[int], session: str = "s") -> ModelRequest:
    return ModelRequest("r", ids, GCONFIG, session=session)


async def streamed(engine: RemoteEngine, req: ModelRequest) -> ModelResponse:
    response = [chunk.response async for chunk in engine.astream(req)][-1]
    assert response is not None
    return response


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * at) % 256 for at in range(length)]


async def test_a_prompt_that_goes_on_travels_from_there_on(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, address):
        remote = await dialled(address)
        whole = prompt(1000)
        await remote.agenerate(ask(whole[:600]))
        answer = await remote.agenerate(ask(whole))
        await streamed(remote, ask([*whole, 1, 2]))
        assert [req.input_ids for req in engine.requests] == [whole[:600], whole, [*whole, 1, 2]]
        assert answer.input_tokens == whole
        assert engine.received == 600 + 400 + 2
        await remote.aclose()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ask(prompt(600)), ask(prompt(700, start=1))),
        (ask(prompt(600)), ask(prompt(599))),
        (ask(prompt(600)), ask(prompt(700), session="other")),
        (ask(prompt(600), session=""), ask(prompt(700), session="")),
        (ask(prompt(100)), ask(prompt(200))),
    ],
    ids=["another beginning", "shorter", "another session", "no session", "too short to keep"],
)
async def test_other_prompts_travel_whole(first: ModelRequest, second: ModelRequest, tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, address):
        remote = await dialled(address)
        for req in (first, second):
            await remote.agenerate(req)
        assert [req.input_ids for req in engine.requests] == [first.input_ids, second.input_ids]
        assert engine.received == len(first.input_ids) + len(second.input_ids)
        await remote.aclose()


async def test_a_list_that_its_owner_changes_later_is_not_taken_for_what_was_sent(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, address):
        remote, req = await dialled(address), ask(prompt(600))
        await remote.agenerate(req)
        req.input_ids[0] += 1
        changed = [*req.input_ids, 5]
        await remote.agenerate(ask(changed))
        assert engine.requests[-1].input_ids == changed
        await remote.aclose()


async def test_an_engine_that_has_forgotten_a_beginning_is_sent_all_of_it(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, address):
        remote = await dialled(address)
        for ask_it in (RemoteEngine.agenerate, streamed):
            await ask_it(remote, ask(prompt(600)))
            remote._sent._keep(10**9, ask(prompt(600)))  # a call that was cancelled before it was sent
            await ask_it(remote, ask(prompt(700)))
            assert engine.requests[-1].input_ids == prompt(700)
        assert engine.received == 2 * (600 + 100 + 700)
        await remote.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_any_conversations_arrive_as_they_are(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that go on, branch, begin again, call at once and are cancelled, over connections that end; in a cache
    that is too small for all."""
    monkeypatch.setattr("areal.engine.inference.remote.SHORTEST_KEPT", 4)
    monkeypatch.setattr("areal.engine.inference.remote.MOST_KEPT", 200)
    dice = random.Random(seed)
    async with served(tmp_path) as (engine, address):
        remote = await dialled(address)
        told: dict[str, list[list[int]]] = {}
        for _ in range(150):
            if dice.random() < 0.04:
                await remote.aclose()
                remote = await dialled(address)
            calls = {}
            for number in range(dice.randint(1, 4)):
                session = f"s{dice.randint(0, 5)}"
                known = dice.choice(told.get(session, [[]]))
                cut = known[: dice.randint(0, len(known))] if dice.random() < 0.3 else known
                ids = [*cut, *(dice.randrange(256) for _ in range(dice.randint(1, 12)))]
                told.setdefault(session, []).append(ids)
                req = ModelRequest(f"{session} {number}", ids, GCONFIG, session=session)
                ask_it = streamed if dice.random() < 0.3 else RemoteEngine.agenerate
                calls[asyncio.ensure_future(ask_it(remote, req))] = req
            for _ in range(dice.randint(0, 6)):
                await asyncio.sleep(0)
            for call in calls:
                if dice.random() < 0.2:
                    call.cancel()
            engine_saw = len(engine.requests)
            outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
            for outcome, req in zip(outcomes, calls.values(), strict=True):
                if not isinstance(outcome, asyncio.CancelledError):
                    assert isinstance(outcome, ModelResponse), outcome
                    assert outcome.input_tokens == req.input_ids
            asked = {req.rid: req.input_ids for req in calls.values()}
            assert all(asked.get(req.rid, req.input_ids) == req.input_ids for req in engine.requests[engine_saw:])
            engine.requests.clear()
        assert engine.received < sum(len(ids) for each in told.values() for ids in each)
        await remote.aclose()
