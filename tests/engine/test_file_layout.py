"""Weights are published as files have them, also where transformers' modules have them otherwise."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers_models import trainer, write_experts

from areal.engine.model.live import LiveWeights
from areal.engine.model.published import WeightReader
from areal.engine.models import open_runner
from areal.engine.training.engine import TokenBatch
from areal.engine.training.packing import Span
from areal.engine.training.supervised import mean_nll

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "an_expert"),
    [("Qwen3Moe", "mlp.experts.3.up_proj.weight"), ("Mixtral", "block_sparse_moe.experts.3.w3.weight")],
)
def test_published_experts_are_those_of_a_saved_model(family: str, an_expert: str, tmp_path: Path) -> None:
    model = write_experts(tmp_path / "model", family)
    engine, ids = trainer(model), np.arange(10, 40)
    engine.train_batch(TokenBatch([Span(ids, ids[1:] - 10, 0)], torch.ones(29), {"weights": torch.ones(29)}), mean_nll)
    engine.save(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert f"model.layers.1.{an_expert}" in saved
    update = engine.publish()
    published, _ = WeightReader().open(update)
    assert published.keys() == saved.keys()
    runner = open_runner(model, with_weights=False)
    weights = LiveWeights(runner)
    weights.swap(weights.stage(update))
    for name, tensor in runner.named_weights():
        torch.testing.assert_close(tensor, saved[name], atol=0, rtol=0)
    before = load_file(model / "model.safetensors")
    assert not torch.equal(before[f"model.layers.1.{an_expert}"], saved[f"model.layers.1.{an_expert}"])
    engine.close()
