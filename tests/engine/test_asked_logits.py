"""The likeliest alternatives of a token, and logits that a request changes."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import training_engine

from areal.api.io_struct import ModelRequest, Steering, TokenChunk
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.asked_logits import steered
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.sequence import SequenceState

pytestmark = pytest.mark.usefixtures("kernel")


@pytest.fixture
async def engine() -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder), max_running=4)
    yield engine
    await engine.aclose()


def ask(top_logprobs: int = 0, steering: Steering | None = None, **settings: Any) -> ModelRequest:
    gconfig = GenerationHyperparameters(**({"max_new_tokens": 12, "seed": 3} | settings))
    return ModelRequest("r", [1, 2, 3], gconfig, top_logprobs=top_logprobs, steering=steering)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
async def test_alternatives_are_the_likeliest_and_have_the_log_prob_that_a_drawn_token_gets(engine, temperature):
    plain = await engine.agenerate(ask(temperature=temperature))
    asked = await engine.agenerate(ask(300, temperature=temperature))
    assert plain.output_alternatives == []
    assert asked.output_tokens == plain.output_tokens
    for told, token, logprob in zip(asked.output_alternatives, asked.output_tokens, asked.output_logprobs, strict=True):
        assert told[token] == pytest.approx(logprob, abs=1e-5)
        values = list(told.values())
        assert values == sorted(values, reverse=True)
        assert torch.tensor(values).exp().sum().item() == pytest.approx(1, 1e-4)
        assert temperature or next(iter(told)) == token


@pytest.mark.slow
async def test_alternatives_stream_with_their_tokens_and_go_on_after_a_move(engine):
    whole = await engine.agenerate(ask(4))
    chunk_by_chunk = TokenChunk()
    async with aclosing(engine.astream(ask(4))) as chunks:
        async for chunk in chunks:
            assert len(chunk.alternatives) == len(chunk.tokens)
            chunk_by_chunk.extend(chunk)
    assert chunk_by_chunk.alternatives == whole.output_alternatives
    begun = TokenChunk(
        whole.output_tokens[:5], whole.output_logprobs[:5], whole.output_versions[:5],
        digests=whole.digests, alternatives=whole.output_alternatives[:5],
    )  # fmt: skip
    moved = await engine.agenerate(replace(ask(4), drawn=begun))
    assert moved.output_tokens == whole.output_tokens
    assert [list(each) for each in moved.output_alternatives] == [list(each) for each in whole.output_alternatives]


@pytest.mark.slow
async def test_a_bias_forces_and_forbids_tokens(engine):
    forced = await engine.agenerate(ask(steering=Steering(bias={7: 100.0})))
    assert forced.output_tokens == [7] * 12
    free = await engine.agenerate(ask(greedy=True))
    banned = dict.fromkeys(free.output_tokens, -100.0)
    other = await engine.agenerate(ask(greedy=True, steering=Steering(bias=banned)))
    assert not set(other.output_tokens) & set(free.output_tokens)


@pytest.mark.slow
async def test_a_strong_penalty_lets_no_token_come_twice(engine):
    for steering in (Steering(presence_penalty=1e4), Steering(frequency_penalty=1e4)):
        answer = await engine.agenerate(ask(steering=steering, max_new_tokens=40))
        assert len(set(answer.output_tokens)) == 40


async def test_penalties_count_the_answer_and_not_the_prompt_and_leave_other_rows_alone():
    asking = ask(steering=Steering(frequency_penalty=0.5, presence_penalty=0.25, bias={4: 2.0}))
    sequences = [
        SequenceState.of(request, vocab_size=8, max_positions=99, tokenizer=None) for request in (asking, ask())
    ]
    sequences[0].ids += [4, 5, 5]
    logits = torch.zeros(2, 8)
    changed = steered(logits, sequences)
    assert changed[0].tolist() == [0, 0, 0, 0, 2.0 - 0.75, -1.25, 0, 0]
    assert changed[1].tolist() == logits[0].tolist() == [0] * 8
    assert steered(logits, sequences[1:]) is logits
