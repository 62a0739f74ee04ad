"""Callers that go away at any moment hurt nobody else: the engine goes on, and no row, queue place or token is lost."""

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from engine_kinds import soon, until
from tiny_models import byte_tokenizer, training_engine

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

ROUNDS = 12
REQUESTS = 40


class InterruptedRunner(DecoderRunner):
    """Calls `on_step` inside every step: after the step was scheduled, before its tokens are drawn."""

    on_step: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, ids: Any, positions: Any, pieces: Any) -> Any:
        self.on_step()
        return super().forward(ids, positions, pieces)


def request(number: int) -> ModelRequest:
    """Short answers, so that many end in the step in which they are cancelled; some take the longer path."""
    settings = GenerationHyperparameters(
        max_new_tokens=1 + number % 5, seed=number, stop=["never in it"] if number % 3 == 0 else []
    )
    return ModelRequest(str(number), [5 + number % 7, *range(1, 2 + number % 4)], settings)


async def read_stream(engine: EmbeddedEngine, req: ModelRequest) -> ModelResponse:
    async with aclosing(engine.astream(req)) as chunks:
        response = [chunk async for chunk in chunks][-1].response
    assert response is not None
    return response


async def await_started(engine: EmbeddedEngine, req: ModelRequest) -> ModelResponse:
    return await engine.start(req).done


class Call:
    """A call that can be made to go away: its task is cancelled, or its deadline passes."""

    def __init__(self, engine: EmbeddedEngine, req: ModelRequest, dice: random.Random) -> None:
        self._deadline: asyncio.Timeout | None = None
        ask = dice.choice([read_stream, EmbeddedEngine.agenerate, await_started])
        self._ask = ask(engine, req)
        self.task = asyncio.create_task(self._timed() if dice.random() < 0.4 else self._ask)

    def go_away(self) -> None:
        if self._deadline is None:
            self.task.cancel()
        elif not self._deadline.expired() and not self.task.done():
            self._deadline.reschedule(asyncio.get_running_loop().time())

    async def _timed(self) -> ModelResponse:
        async with asyncio.timeout(60) as self._deadline:
            return await self._ask


async def test_callers_that_leave_in_the_very_step_that_answers_them_hurt_nobody() -> None:
    runner = InterruptedRunner(training_engine().decoder)
    engine = EmbeddedEngine(runner, byte_tokenizer(), max_running=8)
    expected = [(await soon(engine.agenerate(request(number)))).output_tokens for number in range(REQUESTS)]
    gone = kept = 0
    for round_number in range(ROUNDS):
        dice = random.Random(round_number)
        calls = [Call(engine, request(number), dice) for number in range(REQUESTS)]

        def interrupt(calls: list[Call] = calls, dice: random.Random = dice) -> None:
            for call in dice.sample(calls, 3):
                call.go_away()

        runner.on_step = interrupt
        outcomes = await soon(asyncio.gather(*(call.task for call in calls), return_exceptions=True))
        runner.on_step = lambda: None
        for outcome, tokens in zip(outcomes, expected, strict=True):
            if isinstance(outcome, asyncio.CancelledError | TimeoutError):
                gone += 1
            else:
                assert isinstance(outcome, ModelResponse), outcome
                assert outcome.output_tokens == tokens
                kept += 1
        await until(engine, running=0, waiting=0)
    assert gone > REQUESTS
    assert kept > REQUESTS
    assert (await soon(engine.agenerate(request(1)))).output_tokens == expected[1]
    await engine.aclose()
