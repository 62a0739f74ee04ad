"""Packs computed by transformers' models give what these models compute of each sequence alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_family
from ranks_harness import random_batch

from areal.config.parallel import Ranks
from areal.engine.sharded.model import ShardedModel
from areal.engine.training.engine import TokenBatch
from areal.engine.transformers.model import TransformersModel
from areal.engine.transformers.training import TransformersTraining


@pytest.fixture(params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_family(request.param, tmp_path)


def test_packed_logprobs_are_those_of_each_sequence(directory: Path) -> None:
    batch = random_batch(3)
    alone = _logprobs(TransformersTraining(TransformersModel(directory, trainable=True)), batch)
    packed = _logprobs(ShardedModel(directory, Ranks(1, 1), torch.device("cpu")), batch)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


def _logprobs(model: Any, batch: TokenBatch) -> torch.Tensor:
    out = torch.empty(len(batch.temperatures))
    with torch.no_grad():
        for part in model.passes(batch.spans, 200):
            out[part.order] = model.scores(part, batch.temperatures[part.order])
    return out
