"""Whatever settings pass the door, and whatever logits a model gives, a token is drawn or its request fails alone."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from drawn_rows import with_sets
from engine_kinds import soon
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import training_engine

from areal.api.errors import EngineError
from areal.api.io_struct import ModelRequest
from areal.config.rollout import GREEDY_BELOW, GenerationHyperparameters
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.sampler import BLOCK, SamplingParams, sample
from areal.engine.training.engine import TokenBatch
from areal.engine.training.packing import Span

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

TEMPERATURES = st.sampled_from([0.0, GREEDY_BELOW, 1e-3, 1.0, 2.0, 1e20, 3.4e38]) | st.floats(GREEDY_BELOW, 3.4e38)
TOP_P = st.sampled_from([1.0, 5e-324, 1e-46, 1e-30, 1 - 1e-9]) | st.floats(0, 1, exclude_min=True)
TOP_K = st.sampled_from([0, 1, 2, 2**31]) | st.integers(0, 2**31)
SEEDS = st.integers(0, 2**64 - 1)
LOGIT = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 0.0, 1.0, 40.0])
WIDE = 16 * BLOCK
"""A vocabulary that the sampler searches by blocks."""


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], tuple[float, float, int, int], list[bool]]:
    """Logits, settings and banned tokens of one request."""
    logits = draw(st.lists(LOGIT, min_size=6, max_size=6))
    banned = draw(st.lists(st.booleans(), min_size=6, max_size=6))
    return logits, (draw(TEMPERATURES), draw(TOP_P), draw(TOP_K), draw(SEEDS)), banned


@given(st.lists(rows(), min_size=1, max_size=4), st.sampled_from([6, WIDE]), st.booleans(), st.integers(0, 2**40))
@settings(max_examples=300, deadline=None)
def test_every_row_draws_an_allowed_token_or_says_that_it_cannot(
    asked: list[tuple[list[float], tuple[float, float, int, int], list[bool]]], size: int, ban: bool, count: int
) -> None:
    logits = torch.full((len(asked), size), -torch.inf)
    banned = torch.zeros(len(asked), size, dtype=torch.bool)
    for row, (values, _, bans) in enumerate(asked):
        logits[row, :: size // 6][:6] = torch.tensor(values)
        banned[row, :: size // 6][:6] = torch.tensor(bans)
    params = [each for _, each, _ in asked]
    counts = [count] * len(asked)
    tokens, logprobs, _ = sample(logits, SamplingParams.of_rows(params), counts, banned if ban else None)
    healthy = torch.tensor([0.5, 1.0, 0.0, 2.0, -1.0, 0.0])
    for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        assert 0 <= token < size
        assert logprob <= 0 or math.isnan(logprob)
        allowed = logits[row].masked_fill(banned[row] & ban, -torch.inf)
        if logprob > -math.inf:
            assert allowed[token] > -torch.inf
        elif (logits[row].abs() < 1e30).any() and (logits[row] < 1e30).all() and (allowed.abs() < 1e30).any():
            # Nothing but a quotient beyond float32, or a difference of that size, is a reason.
            kept = allowed[allowed.abs() < 1e30].double() / (params[row][0] or 1.0)
            assert kept.abs().max() > 3e38 or (logits[row].max() - allowed.max()) / (params[row][0] or 1.0) > 80
    # A row does not notice what shares its batch.
    wide = torch.full((1, size), -torch.inf)
    wide[0, :: size // 6][:6] = healthy
    alone = sample(wide, SamplingParams.of_rows([(1.0, 0.9, 0, 5)]), [count])
    both = SamplingParams.of_rows([*params, (1.0, 0.9, 0, 5)])
    together = sample(torch.cat([logits, wide]), both, [*counts, count])
    assert together[0][-1] == alone[0][0]
    assert together[1][-1] == pytest.approx(alone[1][0], abs=1e-5)


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-38},
    {"temperature": 5e-324},
    {"temperature": GREEDY_BELOW},
    {"temperature": 3.4e38},
    {"top_p": 1e-46},
    {"top_p": 5e-324},
    {"top_k": 2**31},
    {"temperature": 1e-38, "top_p": 1e-46, "top_k": 1},
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
    {"stop_token_ids": [-(2**31), 2**31]},
    {"min_new_tokens": 7, "stop_token_ids": list(range(271))},
]


async def test_extreme_settings_are_served_and_their_log_probs_are_those_that_the_trainer_computes() -> None:
    trainer = training_engine()
    engine = EmbeddedEngine(DecoderRunner(trainer.decoder))
    usual = ModelRequest("usual", [1, 2, 3], GenerationHyperparameters(max_new_tokens=8, seed=1))
    expected = (await soon(engine.agenerate(usual))).output_tokens
    for extreme in EXTREMES:
        gconfig = GenerationHyperparameters(**({"max_new_tokens": 8, "seed": 1} | extreme))
        asked = ModelRequest("extreme", [1, 2, 3], gconfig)
        answer, beside = await soon(asyncio.gather(engine.agenerate(asked), engine.agenerate(usual)))
        assert beside.output_tokens == expected
        ids = np.array(answer.input_tokens + answer.output_tokens)
        temperature = gconfig.sampling_temperature
        span = Span(ids, np.arange(answer.input_len, len(ids)), 0)
        batch = TokenBatch([span], torch.full((answer.output_len,), temperature))
        computed = trainer.logprobs(with_sets(batch, [answer]))
        tolerance = 1e-4 * max(1.0, 1 / temperature)  # what rounding of logits becomes when they are divided
        assert computed.tolist() == pytest.approx(answer.output_logprobs, abs=tolerance), extreme
    await engine.aclose()


async def test_settings_changed_after_they_were_checked_fail_alone() -> None:
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder))
    usual = ModelRequest("usual", [1, 2, 3], GenerationHyperparameters(max_new_tokens=8, seed=1))
    expected = (await soon(engine.agenerate(usual))).output_tokens
    for name, value in [("temperature", math.nan), ("top_k", 10**30), ("top_p", math.nan)]:
        gconfig = GenerationHyperparameters(max_new_tokens=8, seed=1)
        setattr(gconfig, name, value)
        calls = [engine.agenerate(ModelRequest("changed", [1, 2, 3], gconfig)), engine.agenerate(usual)]
        changed, beside = await soon(asyncio.gather(*calls, return_exceptions=True))
        assert isinstance(changed, EngineError) or len(changed.output_tokens) == 8
        assert beside.output_tokens == expected
    await engine.aclose()
