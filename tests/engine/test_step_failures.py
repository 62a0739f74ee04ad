"""What goes wrong for one request ends that request; the engine ends only when it cannot compute at all."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kinds import soon, until
from tiny_models import TINY, byte_tokenizer, training_engine
from transformers_models import WRITERS

from areal.api.errors import EngineError, EngineGone
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import MAX_FAILURES, EmbeddedEngine
from areal.engine.inference.grammar import GrammarState
from areal.engine.inference.model_runner import Piece
from areal.engine.models import open_runner
from areal.engine.transformers.runner import TransformersRunner

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

BAD = 99
"""A token that requests hold which are to fail: the second of their prompts."""


def ask(number: int, *, bad: bool = False, **settings: Any) -> ModelRequest:
    settings = {"max_new_tokens": 6 + number % 9, "seed": number} | settings
    ids = [5 + number % 7, *([BAD] if bad else []), *range(1, 2 + number % 3)]
    return ModelRequest(str(number), ids, GenerationHyperparameters(**settings))


async def outcomes(engine: EmbeddedEngine, requests: Sequence[ModelRequest]) -> list[ModelResponse | BaseException]:
    return await soon(asyncio.gather(*map(engine.agenerate, requests), return_exceptions=True))


def tokens(outcome: ModelResponse | BaseException) -> list[int]:
    assert isinstance(outcome, ModelResponse), outcome
    return outcome.output_tokens


async def assert_only_the_bad_fail(engine: EmbeddedEngine, requests: list[ModelRequest], message: str) -> None:
    """Those with the token BAD fail with `message`; the others, and a later one, answer as they do alone."""
    good = [request for request in requests if BAD not in request.input_ids]
    alone = {request.rid: tokens((await outcomes(engine, [request]))[0]) for request in good}
    for request, outcome in zip(requests, await outcomes(engine, requests), strict=True):
        if BAD in request.input_ids:
            assert isinstance(outcome, EngineError), outcome
            assert message in str(outcome)
        else:
            assert tokens(outcome) == alone[request.rid]
    await until(engine, running=0, waiting=0)
    assert engine.failure is None
    assert tokens((await outcomes(engine, good[:1]))[0]) == alone[good[0].rid]
    await engine.aclose()


class Refusing(DecoderRunner):
    """Fails at prompts with the token BAD."""

    def forward(self, ids: Any, positions: Any, pieces: Sequence[Piece]) -> Any:
        if any(piece.ids[1] == BAD for piece in pieces if piece.last and len(piece.ids) > 1):
            raise RuntimeError("no such token")
        return super().forward(ids, positions, pieces)


class RefusingTransformers(TransformersRunner):
    def prefill(self, rows: Any, prompts: Sequence[Sequence[int]], images: Any = ()) -> Any:
        if any(prompt[1] == BAD for prompt in prompts if len(prompt) > 1):
            raise RuntimeError("no such token")
        return super().prefill(rows, prompts, images)


MIXED = [ask(number, bad=number % 6 == 3) for number in range(24)]


async def test_a_prompt_that_cannot_be_computed_fails_alone() -> None:
    engine = EmbeddedEngine(Refusing(training_engine().decoder), max_running=9)
    await assert_only_the_bad_fail(engine, MIXED, "no such token")


async def test_equal_prompts_that_cannot_be_computed_all_fail_and_no_others() -> None:
    engine = EmbeddedEngine(Refusing(training_engine().decoder))
    requests = [ask(7, bad=True), ask(1), ask(7, bad=True), ask(2), ask(7, bad=True)]
    await assert_only_the_bad_fail(engine, requests, "no such token")


async def test_a_long_prompt_that_fails_in_its_middle_fails_alone() -> None:
    class RefusingLate(DecoderRunner):
        def forward(self, ids: Any, positions: Any, pieces: Sequence[Piece]) -> Any:
            if any(BAD in piece.ids[max(350, piece.start) : piece.end] for piece in pieces):
                raise RuntimeError("no such token")
            return super().forward(ids, positions, pieces)

    runner = RefusingLate(training_engine().decoder)
    runner.chunk_tokens = 100
    long = ModelRequest("long", [*[7] * 350, BAD, *[7] * 50], GenerationHyperparameters(max_new_tokens=4, seed=1))
    await assert_only_the_bad_fail(EmbeddedEngine(runner), [ask(1), long, ask(2), ask(4)], "no such token")


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
async def test_a_prompt_that_transformers_cannot_compute_fails_alone(name: str, tmp_path: Path) -> None:
    opened = open_runner(WRITERS[name](tmp_path / name))
    assert isinstance(opened, TransformersRunner)
    engine = EmbeddedEngine(RefusingTransformers(opened.model, caches=opened.caches), max_running=9)
    await assert_only_the_bad_fail(engine, MIXED, "no such token")


async def test_a_prompt_whose_logits_are_no_numbers_fails_alone_and_leaves_none_in_the_cache() -> None:
    decoder = training_engine(replace(TINY, tied_embeddings=False)).decoder
    with torch.no_grad():
        decoder.parameters["embedding"][BAD] = torch.nan
    engine = EmbeddedEngine(DecoderRunner(decoder), max_running=5)
    long = [ModelRequest("long", [6, BAD, *[7] * 60], GenerationHyperparameters(max_new_tokens=2))]
    await assert_only_the_bad_fail(engine, [*MIXED, *long, *MIXED], "NaN")


@pytest.mark.parametrize("settings", [{}, {"greedy": True}, {"top_p": 0.5}, {"stop": ["x"]}, {"min_new_tokens": 2}])
async def test_weights_that_are_no_numbers_fail_requests_and_not_the_engine(settings: dict[str, Any]) -> None:
    trainer = training_engine()
    engine = EmbeddedEngine(DecoderRunner(trainer.decoder), byte_tokenizer())
    before = tokens((await outcomes(engine, [ask(1)]))[0])
    good = trainer.decoder.flat.clone()
    trainer.decoder.flat.fill_(torch.nan)
    broken = await outcomes(engine, [ask(number, stop_token_ids=[3], **settings) for number in range(5)])
    assert all(isinstance(outcome, EngineError) for outcome in broken)
    trainer.decoder.flat.copy_(good)
    assert tokens((await outcomes(engine, [ask(1)]))[0]) == before
    await engine.aclose()


class Panic(BaseException):
    """What Rust code raises when it panics is no `Exception` either."""


class BrokenTokenizer:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise self._error


@pytest.mark.parametrize("error", [UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), Panic("unreachable")])
async def test_a_stop_text_that_cannot_be_looked_for_fails_its_request_alone(error: BaseException) -> None:
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder), BrokenTokenizer(error))
    requests = [ask(number, bad=number == 2, stop=["x"] if number == 2 else []) for number in range(5)]
    await assert_only_the_bad_fail(engine, requests, type(error).__name__)


@pytest.mark.parametrize("method", ["allowed", "advance"])
@pytest.mark.parametrize("error", [ValueError("lost"), Panic("lost")])
async def test_a_grammar_that_breaks_fails_its_request_alone(
    method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder), byte_tokenizer())
    requests = [ask(number, bad=number == 2) for number in range(5)]
    requests[2].grammar = Grammar("lark", "start: /[a-z]+/")

    def broken(self: GrammarState, *args: Any) -> Any:
        raise error

    monkeypatch.setattr(GrammarState, method, broken)
    await assert_only_the_bad_fail(engine, requests, "lost")


class Faulty(DecoderRunner):
    """Fails in the steps for which `fails` is true, told whether it is a step without prompts, and its number."""

    fails: Callable[[bool, int], bool] = staticmethod(lambda decoding, step: False)
    steps = 0

    def forward(self, ids: Any, positions: Any, pieces: Sequence[Piece]) -> Any:
        self.steps += 1
        logits = super().forward(ids, positions, pieces)
        if self.fails(not pieces, self.steps):
            raise MemoryError("for now")
        return logits


@pytest.mark.parametrize("step", range(1, 12))
async def test_a_step_that_fails_once_costs_nobody_anything(step: int) -> None:
    runner = Faulty(training_engine().decoder)
    engine = EmbeddedEngine(runner, max_running=6)
    requests = [ask(number) for number in range(12)]
    expected = list(map(tokens, await outcomes(engine, requests)))
    runner.steps, runner.fails = 0, lambda decoding, number: number == step
    assert list(map(tokens, await outcomes(engine, requests))) == expected
    assert runner.steps > step
    await engine.aclose()


async def test_an_engine_that_can_only_compute_prompts_ends_its_requests_and_lives() -> None:
    runner = Faulty(training_engine().decoder)
    engine = EmbeddedEngine(runner)
    requests = [ask(number, max_new_tokens=50) for number in range(5)]
    runner.fails = lambda decoding, number: decoding
    ended = await outcomes(engine, requests)
    assert any(isinstance(outcome, EngineError) for outcome in ended)
    runner.fails = lambda decoding, number: False
    assert all(len(tokens(outcome)) == 50 for outcome in await outcomes(engine, requests))
    await engine.aclose()


async def test_an_engine_that_cannot_compute_a_token_says_that_it_has_failed() -> None:
    runner = Faulty(training_engine().decoder)
    engine = EmbeddedEngine(runner)
    told: list[str | None] = []
    engine.on_failure = lambda: told.append(engine.failure)
    first = tokens((await outcomes(engine, [ask(1)]))[0])
    runner.steps = 0
    runner.fails = lambda decoding, number: number < 2 * MAX_FAILURES  # a step, then a trial of one token
    assert tokens((await outcomes(engine, [ask(1)]))[0]) == first
    assert told == []
    runner.fails = lambda decoding, number: True
    assert [type(outcome) for outcome in await outcomes(engine, [ask(1), ask(2)])] == [EngineGone] * 2
    assert told == ["the engine failed: MemoryError('for now')"]
    with pytest.raises(EngineError, match="MemoryError"):
        await engine.health()
    await engine.aclose()
