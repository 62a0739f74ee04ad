"""Pairs through the training engine: gradients against losses written down plainly, however the batch is cut."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import TINY, byte_tokenizer, randomise, training_engine
from torch import Tensor

from areal.algorithms.preference import JudgedPairs, bradley_terry, dpo
from areal.config.training import OptimizerConfig
from areal.engine.training.engine import ScoringEngine, TokenBatch, TrainingEngine
from areal.engine.training.offload import OffloadedScoring
from areal.engine.training.packing import PackedDecoder, Span
from areal.engine.training.pairs import (
    Pair,
    WeightedScores,
    answers_of_pairs,
    conversation_end,
    ends_of_pairs,
    lengths_of_pairs,
    spread_over_pairs,
    sums_of_pairs,
)

pytestmark = pytest.mark.slow

BETA = 0.3


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


PAIRS = [
    Pair(said("Sort 5291", "1259"), said("Sort 5291", "9521, of course"), 1),
    Pair(said("2+2", "5", "No.", "4"), said("2+2", "5", "No.", "6", "No!", "7"), 3),
    Pair(said("Hi", "Hello there, how are you?"), said("Hi", ""), 1),
]


def engine(value_head: bool = False, max_tokens: int = 16384) -> TrainingEngine:
    return training_engine(replace(TINY, value_head=value_head), max_tokens_per_mb=max_tokens)


def plain_hidden(engine: TrainingEngine, span: Span) -> Tensor:
    def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(0, 1)

    ids = torch.from_numpy(span.ids)
    return engine.decoder.hidden(ids, torch.arange(len(ids)), causal)


def gradient(engine: TrainingEngine, batch: TokenBatch, judged: JudgedPairs) -> Tensor:
    """What a step takes: the norm is not clipped, and the weights stay as they are."""
    batch.fields["coefficients"] = spread_over_pairs(batch, judged.slopes / len(PAIRS))
    engine.train_batch(batch, WeightedScores())
    return engine.flat_grad.clone()


def still(value_head: bool = False, max_tokens: int = 16384) -> TrainingEngine:
    options = OptimizerConfig(lr=1e-12, warmup_steps=0, gradient_clipping=0)
    return training_engine(replace(TINY, value_head=value_head), max_tokens_per_mb=max_tokens, optimizer=options)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("max_tokens", [16384, 40, 1])
def test_gradient_of_dpo_is_that_of_its_loss_however_pairs_are_cut(max_tokens: int) -> None:
    model, batch = still(max_tokens=max_tokens), answers_of_pairs(PAIRS, byte_tokenizer())
    reference = torch.linspace(-40, -20, 6, dtype=torch.float64).view(3, 2)
    judged = dpo(sums_of_pairs(batch, model.logprobs(batch)), reference, lengths_of_pairs(batch), BETA, 0.1, 0.5)
    found = gradient(model, batch, judged)

    model.flat_grad.zero_()
    losses = []
    for pair, (chosen, rejected) in enumerate(zip(batch.spans[::2], batch.spans[1::2], strict=True)):
        logprobs = []
        for span in (chosen, rejected):
            table = model.decoder.logits(plain_hidden(model, span)).log_softmax(1)
            logprobs.append(table[span.asked - 1, torch.from_numpy(span.ids)[span.asked]].double().sum())
        margin = BETA * (logprobs[0] - reference[pair, 0] - logprobs[1] + reference[pair, 1])
        losses.append(-0.9 * F.logsigmoid(margin) - 0.1 * F.logsigmoid(-margin))
        losses[-1] = losses[-1] - 0.5 * logprobs[0] / len(chosen.asked)
    torch.stack(losses).mean().backward()
    assert torch.allclose(judged.loss, torch.stack(losses), atol=1e-4)
    assert_close(found, model.flat_grad)


@pytest.mark.parametrize("max_tokens", [16384, 1])
def test_gradient_of_a_reward_model_is_that_of_bradley_and_terry(max_tokens: int) -> None:
    model, batch = still(value_head=True, max_tokens=max_tokens), ends_of_pairs(PAIRS, byte_tokenizer())
    judged = bradley_terry(sums_of_pairs(batch, model.values(batch)))
    found = gradient(model, batch, judged)

    model.flat_grad.zero_()
    scores = torch.stack([model.decoder.values(plain_hidden(model, span))[-2] for span in batch.spans]).view(-1, 2)
    loss = -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean()
    loss.backward()
    assert float(judged.loss.mean()) == pytest.approx(float(loss.detach()), abs=1e-5)
    assert_close(found, model.flat_grad)


def test_only_answers_after_the_shared_messages_are_asked() -> None:
    batch = answers_of_pairs(PAIRS, byte_tokenizer())
    texts = [byte_tokenizer().decode(span.ids[span.asked]) for span in batch.spans]
    assert [text.replace("<|im_end|>", "|") for text in texts] == [
        "1259|",
        "9521, of course|",
        "4|",
        "6|7|",
        "Hello there, how are you?|",
        "|",
    ]


def test_score_is_that_of_a_sequence_classifier_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = engine(value_head=True)
    model.save(str(tmp_path))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    classifier.config.pad_token_id = 271  # an id that no text has
    span = conversation_end(said("Sort 5291", "1259"), None, byte_tokenizer(), 0)
    (found,) = model.values(TokenBatch([span], torch.ones(1)))
    with torch.no_grad():
        expected = classifier(torch.from_numpy(span.ids[:-1])[None]).logits
    assert float(found) == pytest.approx(float(expected), abs=1e-5)


def test_offloaded_model_computes_the_same_and_keeps_nothing_on_its_device_in_between() -> None:
    decoder = PackedDecoder(TINY, frozen=True)
    randomise(decoder.decoder)
    scoring, batch = ScoringEngine(decoder), answers_of_pairs(PAIRS, byte_tokenizer())
    expected = scoring.logprobs(batch)
    offloaded = OffloadedScoring(scoring)
    for _ in range(2):
        assert decoder.flat.untyped_storage().nbytes() == 0
        assert torch.equal(offloaded.logprobs(batch), expected)
    assert decoder.flat.untyped_storage().nbytes() == 0
