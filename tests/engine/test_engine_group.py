"""A group of engines: where requests go, and what becomes of them when engines end."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import byte_tokenizer

from areal.api.engine_api import WeightUpdate
from areal.api.errors import DrawnRefused, EngineError, EngineGone, RequestError
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse, TokenChunk
from areal.api.messages import EngineAddress
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.fake import FakeEngine
from areal.engine.inference.group import MAX_FRUITLESS_ENDS, SPILL, EngineConnections, EngineGroup
from areal.engine.inference.remote import GENERATE_ROLE, worker_handlers
from areal.infra.rpc.connect import Listener, serve
from areal.infra.rpc.frames import role_secret
from areal.infra.rpc.wire import api_wire
from areal.utils import waits
from areal.utils.waits import Waits


class Engine(FakeEngine):
    """Ends after so many tokens if told so, like one whose process is killed: what it had drawn by then is known."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(vocab_size=261, tokenizer=byte_tokenizer(), **settings)
        self.ends_after: int | None = None
        self.refuses_drawn = False

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        drawn = TokenChunk()
        try:
            async for chunk in self.astream(req):
                drawn.extend(chunk)
                if chunk.response is not None:
                    return chunk.response
        except EngineGone as gone:
            raise EngineGone(str(gone), drawn) from None
        raise AssertionError

    async def astream(self, req: ModelRequest, *, every_seconds: float = 0.0) -> Any:
        if self.refuses_drawn and req.drawn is not None:
            self.requests.append(req)
            raise DrawnRefused("it does not go on from drawn tokens")
        async with aclosing(super().astream(req)) as chunks:
            async for chunk in chunks:
                yield chunk
                if self.ends_after is not None:
                    self.ends_after -= len(chunk.tokens)
                    if self.ends_after <= 0:
                        await self.aclose()


async def test_an_episode_is_known_to_have_asked_whichever_way_it_came_to_an_engine() -> None:
    group = EngineGroup()
    group.add("one", Engine())
    with waits.of(Waits()) as own:
        assert not own.asked_model
        await group.agenerate(ask())
        assert own.asked_model
    with waits.of(Waits()) as own:
        async with aclosing(group.astream(ask())) as chunks:
            await anext(chunks)
        assert own.asked_model
    await group.aclose()


def ask(*ids: int, session: str = "", **settings: Any) -> ModelRequest:
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 20, "seed": 1, **settings})
    return ModelRequest("r", list(ids) or [1, 2, 3], gconfig, session=session)


def group_of(*engines: FakeEngine, **settings: Any) -> EngineGroup:
    group = EngineGroup(**settings)
    for number, engine in enumerate(engines):
        group.add(str(number), engine)
    return group


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 20)


async def stream(group: EngineGroup, request: ModelRequest) -> list[TokenChunk]:
    async with asyncio.timeout(20), aclosing(group.astream(request)) as chunks:
        return [chunk async for chunk in chunks]


async def test_session_stays_with_its_engine() -> None:
    engines = [Engine(), Engine(), Engine()]
    group = group_of(*engines)
    for turn in range(4):
        for number in range(6):
            await soon(group.agenerate(ask(number, turn, session=f"s{number}")))
    homes = [{request.session for request in engine.requests} for engine in engines]
    assert sum(len(home) for home in homes) == 6
    assert [len(home) for home in homes] == [2, 2, 2]


async def test_samples_of_one_prompt_go_to_one_engine_and_other_prompts_elsewhere() -> None:
    engines = [Engine(), Engine()]
    group = group_of(*engines)
    requests = [ask(prompt, session=f"{prompt}-{sample}") for prompt in range(4) for sample in range(4)]
    await soon(asyncio.gather(*map(group.agenerate, requests)))
    prompts = [{request.input_ids[0] for request in engine.requests} for engine in engines]
    assert sorted(map(sorted, prompts)) == [[0, 2], [1, 3]]


async def test_session_moves_between_calls_when_its_engine_has_much_more_to_do() -> None:
    engines = [Engine(hold=asyncio.Event()), Engine()]
    group = group_of(*engines)
    busy = [asyncio.ensure_future(group.agenerate(ask(7, session=f"busy{number}"))) for number in range(SPILL)]
    await engines[0].until_in_flight(SPILL)
    await soon(group.agenerate(ask(7, session="busy0")))
    assert [request.session for request in engines[1].requests] == ["busy0"]
    assert engines[0].hold is not None
    engines[0].hold.set()
    await soon(asyncio.gather(*busy))


@pytest.mark.parametrize("at", [1, 7, 19])
async def test_answer_whose_engine_ends_is_the_uninterrupted_one(at: int) -> None:
    expected = await soon(Engine().agenerate(ask()))
    first, second = Engine(), Engine()
    first.ends_after = at
    group = group_of(first, second)
    response = await soon(group.agenerate(ask()))
    assert response == expected
    (again,) = second.requests
    assert again.drawn is not None
    assert again.drawn.tokens == expected.output_tokens[:at]
    assert (group.members, group.moved, group.tokens_again) == (["1"], 1, 3 + at)


@pytest.mark.parametrize("ends", [[3], [3, 5], [1, 1, 1, 1, 1]])
async def test_stream_goes_on_without_gap_or_repeat(ends: list[int]) -> None:
    expected = await soon(Engine().agenerate(ask()))
    engines = [Engine() for _ in range(len(ends) + 1)]
    for engine, at in zip(engines, ends, strict=False):
        engine.ends_after = at
    chunks = await stream(group_of(*engines), ask())
    assert [token for chunk in chunks for token in chunk.tokens] == expected.output_tokens
    assert [chunk.response for chunk in chunks if chunk.response is not None] == [expected]


async def test_answer_that_was_complete_when_its_engine_ended_is_not_drawn_again() -> None:
    expected = await soon(Engine().agenerate(ask()))

    class EndsAfterTheLastToken(Engine):
        async def agenerate(self, req: ModelRequest) -> ModelResponse:
            response = await super().agenerate(req)
            tokens, versions = response.output_tokens, response.output_versions
            raise EngineGone("killed", TokenChunk(tokens, response.output_logprobs, versions, digests={0: "fake-0"}))

    assert await soon(group_of(EndsAfterTheLastToken(), Engine()).agenerate(ask())) == expected


async def test_calls_wait_while_there_is_no_engine() -> None:
    group = group_of()
    waiting = asyncio.ensure_future(group.agenerate(ask()))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    group.add("late", Engine())
    assert (await soon(waiting)).output_len == 20


async def test_answers_move_to_an_engine_that_joins_later_when_the_last_ends() -> None:
    first = Engine(hold=asyncio.Event(), interrupt_at=5)
    group = group_of(first)
    waiting = [asyncio.ensure_future(group.agenerate(ask(number))) for number in range(8)]
    await first.until_in_flight(8)
    await first.aclose()
    await first.until_in_flight(0)
    assert (group.members, group.outages) == ([], 1)
    group.add("next", Engine())
    answers = await soon(asyncio.gather(*waiting))
    assert [answer.output_len for answer in answers] == [20] * 8


async def test_waiting_calls_fail_when_no_engine_will_join() -> None:
    group = group_of()
    waiting = asyncio.ensure_future(group.agenerate(ask()))
    await asyncio.sleep(0)
    group.give_up("the run has failed")
    with pytest.raises(EngineGone, match="the run has failed"):
        await soon(waiting)


async def test_engines_of_a_run_that_has_failed_still_answer() -> None:
    group = group_of(Engine())
    group.give_up("the run has failed")
    assert (await soon(group.health())).version == 0
    await soon(group.aclose())
    with pytest.raises(EngineGone, match="the run has failed"):
        await soon(group.health())


async def test_refused_requests_are_not_sent_to_another_engine() -> None:
    engines = [Engine(), Engine()]
    with pytest.raises(RequestError, match="must lie in"):
        await soon(group_of(*engines).agenerate(ask(10**6)))
    assert sum(len(engine.requests) for engine in engines) == 1


async def test_request_that_engines_end_at_is_given_up_and_others_are_served() -> None:
    def poison(request: ModelRequest) -> Exception | None:
        return EngineGone("segmentation fault") if request.input_ids == [66] else None

    engines = [Engine(failure=poison) for _ in range(MAX_FRUITLESS_ENDS + 1)]
    group = group_of(*engines)
    with pytest.raises(EngineError, match=f"{MAX_FRUITLESS_ENDS} engines ended before they drew a token"):
        await soon(group.agenerate(ask(66)))
    assert len(group.members) == 1
    assert (await soon(group.agenerate(ask(1)))).output_len == 20


async def test_answer_begins_again_where_the_next_engine_refuses_its_drawn_tokens() -> None:
    first, second = Engine(), Engine()
    first.ends_after, second.refuses_drawn = 4, True
    response = await soon(group_of(first, second).agenerate(ask()))
    assert response.output_len == 20
    assert [request.drawn is None for request in second.requests] == [False, True]


async def test_stream_that_was_read_does_not_begin_again() -> None:
    first, second = Engine(), Engine()
    first.ends_after, second.refuses_drawn = 4, True
    with pytest.raises(DrawnRefused):
        await stream(group_of(first, second), ask())


async def test_callers_own_drawn_tokens_are_refused_not_dropped() -> None:
    letters = byte_tokenizer().encode("no")
    drawn = TokenChunk(letters, [-1.0] * len(letters), [-5] * len(letters), digests={-5: "a"})
    request = replace(ask(), grammar=Grammar("lark", "start: /[0-9]{9}/"), drawn=drawn)
    with pytest.raises(DrawnRefused):
        await soon(group_of(Engine(), Engine()).agenerate(request))


async def test_constrained_answer_goes_on_within_its_grammar() -> None:
    request = replace(ask(), grammar=Grammar("lark", "start: /[0-9]{9}/"))
    expected = await soon(Engine().agenerate(request))
    first = Engine()
    first.ends_after = 4
    assert await soon(group_of(first, Engine()).agenerate(request)) == expected


class Slow(Engine):
    """Does not take weights in time."""

    async def update_weights(self, update: WeightUpdate) -> None:
        raise TimeoutError("it did not answer 'update_weights' within 60 s")


async def test_engine_that_fails_to_take_weights_leaves_the_group() -> None:
    lost: list[tuple[str, str]] = []

    def on_lost(name: str, error: BaseException) -> None:
        lost.append((name, type(error).__name__))

    group = group_of(Slow(), Engine(), on_lost=on_lost)
    await soon(group.update_weights(WeightUpdate(5, "five", "")))
    assert (group.members, lost) == (["1"], [("0", "TimeoutError")])
    assert (await soon(group.health())).version == 5


async def test_weights_reach_the_engine_that_joins_when_all_have_ended() -> None:
    group = group_of(Slow())
    update = asyncio.ensure_future(group.update_weights(WeightUpdate(5, "five", "")))
    done, _ = await asyncio.wait({update}, timeout=0.05)
    assert not done
    group.add("next", Engine())
    await soon(update)
    assert (await soon(group.health())).digest == "five"


# From here: groups that are connected to engines as in a rollout worker.


async def served(engine: FakeEngine, place: Path) -> Listener:
    """The engine at a socket."""
    return await serve(
        f"unix:{place}",
        lambda channel: channel.handlers.update(worker_handlers(engine, channel)),
        wire=api_wire(),
        secret=role_secret(SECRET, GENERATE_ROLE),
    )


SECRET = b"of the run"


async def test_group_follows_the_engines_that_are_named(tmp_path: Path) -> None:
    engines = [Engine(), Engine()]
    listeners = [await served(engine, tmp_path / str(number)) for number, engine in enumerate(engines)]
    first, second = (EngineAddress("engine", number, each.address) for number, each in enumerate(listeners))
    lost: list[EngineAddress] = []
    group = EngineGroup()
    connections = EngineConnections(group, SECRET, lost.append)
    await soon(connections.follow([first]))
    await soon(connections.follow([first, second]))
    assert group.members == ["engine #0", "engine #1"]
    held = asyncio.ensure_future(group.agenerate(ask(1, max_new_tokens=200)))
    await asyncio.sleep(0)
    await soon(connections.follow([second]))
    assert (await soon(held)).output_len == 200
    assert (group.members, lost) == (["engine #1"], [])
    await soon(connections.follow([]))
    assert lost == []
    for listener in listeners:
        await listener.close()


async def test_engine_that_cannot_be_reached_is_reported(tmp_path: Path) -> None:
    listener = await served(Engine(), tmp_path / "there")
    there = EngineAddress("there", 1, listener.address)
    nowhere = EngineAddress("nowhere", 1, f"unix:{tmp_path}/nowhere")
    closed = EngineAddress("closed", 1, listener.address, b"another secret")
    lost: list[EngineAddress] = []
    group = EngineGroup()
    connections = EngineConnections(group, SECRET, lost.append)
    await soon(connections.follow([there, nowhere, closed]))
    assert group.members == ["there #1"]
    assert sorted(each.name for each in lost) == ["closed", "nowhere"]
    waiting = asyncio.ensure_future(group.agenerate(ask(max_new_tokens=4000)))
    await listener.close()
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    assert group.members == []
    assert lost[-1] == there
    group.give_up("the end")
    with pytest.raises(EngineGone):
        await soon(waiting)
