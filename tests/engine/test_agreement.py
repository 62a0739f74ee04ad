"""The log-probs that the engine reports are those that the trainer computes, whatever happened while it sampled."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_rows import with_sets
from tiny_models import TINY, training_engine, write_model

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.config.rollout import GenerationHyperparameters
from areal.config.training import OptimizerConfig
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.inference.server import load_engine
from areal.engine.model.architecture import read_architecture
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.engine.training.packing import Span
from areal.utils.hf_utils import load_hf_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

TOLERANCE = 1e-4
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"greedy": True, "temperature": 0.3},
    {"top_p": 0.7},
    {"top_k": 3, "temperature": 1.2},
    {"min_new_tokens": 7, "stop_token_ids": list(range(100))},
]


def requests(count: int, **fixed: Any) -> list[ModelRequest]:
    draw = np.random.default_rng(0)
    return [
        ModelRequest(
            str(i),
            draw.integers(0, TINY.vocab_size, draw.integers(1, 30)).tolist(),
            GenerationHyperparameters(**({"max_new_tokens": 8 + i, "seed": i} | SETTINGS[i % len(SETTINGS)] | fixed)),
        )
        for i in range(count)
    ]


def recomputed(trainer: TrainingEngine, asked: list[ModelRequest], answers: list[ModelResponse]) -> torch.Tensor:
    """The trainer's log-probs of every sampled token, in order, over what it was drawn from."""
    spans, temperatures = [], []
    for request, response in zip(asked, answers, strict=True):
        ids = np.array(response.input_tokens + response.output_tokens)
        spans.append(Span(ids, np.arange(response.input_len, len(ids)), group=response.input_tokens[0]))
        g = request.gconfig
        temperatures += [1.0 if g.greedy else g.temperature] * response.output_len
    return trainer.logprobs(with_sets(TokenBatch(spans, torch.tensor(temperatures)), answers))


async def test_logprobs_agree_at_every_temperature_and_limit(tmp_path: Path) -> None:
    engine = load_engine(write_model(tmp_path))
    asked = requests(28)
    answers = await asyncio.gather(*map(engine.agenerate, asked))
    sampled = torch.tensor([logprob for response in answers for logprob in response.output_logprobs])
    torch.testing.assert_close(recomputed(training_engine(), asked, answers), sampled, atol=TOLERANCE, rtol=0)
    await engine.aclose()


async def test_logprobs_agree_with_the_weights_of_each_tokens_version(tmp_path: Path) -> None:
    engine, trainer = load_engine(write_model(tmp_path)), training_engine()
    asked = requests(12, max_new_tokens=60, min_new_tokens=0, stop_token_ids=[])
    tasks = [asyncio.create_task(engine.agenerate(request)) for request in asked]
    weights = {0: trainer.flat.detach().clone()}
    for version in (1, 2, 3):
        produced = engine.tokens_generated
        async with asyncio.timeout(60):
            while engine.tokens_generated < produced + 150:
                await engine.health()  # raises if it failed
                await asyncio.sleep(0)  # one step of the engine
        trainer.version = version
        trainer.flat.mul_(1.2 if version % 2 else 0.8)
        weights[version] = trainer.flat.detach().clone()
        await engine.update_weights(trainer.publish())
    answers = await asyncio.gather(*tasks)
    versions = torch.tensor([version for response in answers for version in response.output_versions])
    sampled = torch.tensor([logprob for response in answers for logprob in response.output_logprobs])
    assert set(versions.tolist()) == {0, 1, 2, 3}
    for version, flat in weights.items():
        trainer.flat.copy_(flat)
        of_version = versions == version
        torch.testing.assert_close(
            recomputed(trainer, asked, answers)[of_version], sampled[of_version], atol=TOLERANCE, rtol=0
        )
    await engine.aclose()
    trainer.close()


async def test_logprobs_of_the_builtin_model_agree(tiny_math: Path) -> None:
    tokenizer, engine = load_hf_tokenizer(tiny_math), load_engine(tiny_math)
    trainer = TrainingEngine(read_architecture(tiny_math), OptimizerConfig(), total_steps=1, directory=tiny_math)
    asked = [
        ModelRequest(
            str(i),
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"Sort {1000 + i}"}], add_generation_prompt=True
            ),
            GenerationHyperparameters(max_new_tokens=16, seed=i, stop_token_ids=[tokenizer.eos_token_id]),
        )
        for i in range(64)
    ]
    answers = await asyncio.gather(*map(engine.agenerate, asked))
    sampled = torch.tensor([logprob for response in answers for logprob in response.output_logprobs])
    torch.testing.assert_close(recomputed(trainer, asked, answers), sampled, atol=TOLERANCE, rtol=0)
    await engine.aclose()


@pytest.mark.parametrize("rows", [1, 3])
async def test_logprobs_agree_when_requests_take_turns(rows: int) -> None:
    """Sequences move between cache rows as others end; nothing of a row's earlier sequence may show."""
    engine = EmbeddedEngine(DecoderRunner(training_engine().decoder), max_running=rows)
    asked = requests(9)
    answers = await asyncio.gather(*map(engine.agenerate, asked))
    sampled = torch.tensor([logprob for response in answers for logprob in response.output_logprobs])
    torch.testing.assert_close(recomputed(training_engine(), asked, answers), sampled, atol=TOLERANCE, rtol=0)
    await engine.aclose()
