"""Packs computed by transformers' models give what these models compute of each sequence alone."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_family
from ranks_harness import random_batch
from varlen_on_cpu import varlen_on_cpu

from areal.api.errors import ModelError
from areal.config.parallel import Ranks
from areal.engine.model.device import CPU
from areal.engine.sharded.messages import Share, rank_wire
from areal.engine.sharded.model import ShardedModel
from areal.engine.sharded.packed_attention import find_kernel
from areal.engine.training import head
from areal.engine.training.engine import TokenBatch
from areal.engine.training.packing import pack
from areal.engine.training.token_sets import FIELD, TokenSets
from areal.engine.transformers.model import TransformersModel
from areal.engine.transformers.training import TransformersTraining


@pytest.fixture(params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_family(request.param, tmp_path)


def test_packed_logprobs_are_those_of_each_sequence(directory: Path) -> None:
    batch = random_batch(3)
    alone = _logprobs(TransformersTraining(TransformersModel(directory, trainable=True)), batch)
    packed = _logprobs(ShardedModel(directory, Ranks(1, 1), CPU), batch)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Gemma2"])  # which caps its scores
def test_sequences_of_various_lengths_are_computed_as_with_masks(name: str, tmp_path: Path) -> None:
    directory, batch = write_family(name, tmp_path), random_batch(3)
    batch.spans.append(batch.spans[0])  # a sequence twice has nothing new the second time
    batch.spans[2].group = 99  # and one stands alone
    count = sum(len(span.asked) for span in batch.spans)
    batch = TokenBatch(batch.spans, torch.linspace(0.5, 1.5, count), {"weights": torch.linspace(0, 1, count) / count})
    masks, segments = (ShardedModel(directory, Ranks(1, 1), CPU, kernel=kernel) for kernel in (None, varlen_on_cpu))
    torch.testing.assert_close(_logprobs(segments, batch), _logprobs(masks, batch), atol=1e-5, rtol=0)
    for model in (masks, segments):
        for part in model.passes(batch.spans, 200):
            found = model.scores(part, batch.temperatures[part.order])
            (found * batch.fields["weights"][part.order]).sum().backward()
    expected = dict(masks.module.named_parameters())
    for parameter, each in segments.module.named_parameters():
        torch.testing.assert_close(each.grad, expected[parameter].grad, atol=1e-5, rtol=0)


def test_prefixes_are_shared_without_masks(tmp_path: Path) -> None:
    """By more sequences than with them, whose squares cost something."""
    batch = random_batch(3)
    masks, segments = (list(pack(batch.spans, 200, kernel)) for kernel in (None, varlen_on_cpu))
    assert sum(part.tokens for part in segments) <= sum(part.tokens for part in masks)
    assert sum(part.tokens for part in segments) < sum(int(span.asked[-1]) for span in batch.spans)


@pytest.mark.parametrize(
    ("family", "device", "dtype", "lacks"),
    [
        ("Llama", "cpu", "bfloat16", "the device cpu"),
        ("Llama", "cuda", "float32", "actor.dtype float32"),
        ("Gemma2", "cuda", "bfloat16", "attn_logit_softcapping 2.0"),
    ],
)
def test_varlen_is_refused_where_there_is_no_kernel(
    family: str, device: str, dtype: str, lacks: str, tmp_path: Path
) -> None:
    directory = write_family(family, tmp_path)
    with pytest.raises(ModelError, match=f"actor.attention varlen is for GPUs.* got {lacks}.*; use auto"):
        find_kernel("varlen", directory, torch.device(device), dtype)
    assert find_kernel("auto", directory, torch.device(device), dtype) is None


def test_varlen_is_chosen_on_a_gpu_in_half_precision(tmp_path: Path) -> None:
    directory = write_family("Mistral", tmp_path)
    for attention in ("auto", "varlen"):
        kernel = find_kernel(attention, directory, torch.device("cuda"), "bfloat16")
        assert kernel is not None
        asked, given = (inspect.signature(each).parameters for each in (kernel, varlen_on_cpu))
        assert [name for name in asked if name in given] == [*given]
    assert find_kernel("mask", directory, torch.device("cuda"), "bfloat16") is None


def _logprobs(model: Any, batch: TokenBatch) -> torch.Tensor:
    out = torch.empty(len(batch.temperatures))
    with torch.no_grad():
        for part in model.passes(batch.spans, 200):
            out[part.order] = model.scores(part, batch.temperatures[part.order], batch.drawn_at(part.order))
    return out


def test_log_probs_are_taken_over_what_was_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a share that has travelled to its rank, and where logits are held a piece at a time."""
    directory, batch = write_family("Llama", tmp_path), random_batch(3)
    targets = [int(span.ids[place]) for span in batch.spans for place in span.asked]
    left = [sorted({target, 3, 5 + number % 7}) for number, target in enumerate(targets)]
    sizes = torch.tensor([0, *map(len, left)])
    ids = torch.tensor([each for one in left for each in one])
    inverted = torch.tensor([True, *[False] * len(left)])
    batch.sets = TokenSets(ids, sizes.cumsum(0) - sizes, sizes, inverted)
    numbers = torch.arange(len(targets))
    batch.fields[FIELD] = torch.where(numbers % 4 == 0, 0, numbers + 1)  # every fourth was drawn from everything
    alone = _logprobs(TransformersTraining(TransformersModel(directory, trainable=True)), batch)
    travelled = rank_wire().unpack(rank_wire().pack(Share.of(batch))).batch()
    packed = ShardedModel(directory, Ranks(1, 1), CPU)
    torch.testing.assert_close(_logprobs(packed, travelled), alone, atol=1e-5, rtol=0)
    monkeypatch.setattr(head, "HEAD_ELEMENTS", 3 * packed.module.config.vocab_size)
    torch.testing.assert_close(_logprobs(packed, travelled), alone, atol=1e-5, rtol=0)
    batch.sets = None
    assert (_logprobs(packed, batch) - alone).abs().max() > 0.1
