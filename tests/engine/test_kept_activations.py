"""What a plan says autograd keeps of a pass is what it keeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal.config.parallel import Ranks
from areal.engine.memory import Training, layer_token_bytes
from areal.engine.model.architecture import Architecture, read_architecture, write_architecture
from areal.engine.model.decoder import Decoder, initialise, parameter_count
from areal.engine.model.shape import read_shape, stored_parameters
from areal.engine.model.weights import save_weights
from areal.engine.sharded.model import ShardedModel
from areal.engine.training.packing import PackedDecoder, Span

pytestmark = pytest.mark.slow
FAMILIES = ["llama", "qwen2", "qwen3"]
TOKENS = 200


def written(place: Path, family: str, layers: int) -> Path:
    architecture = Architecture(family, 64, 96, layers, 6, 2, 16, 256, 512, tied_embeddings=True)
    decoder = Decoder(architecture)
    initialise(decoder, torch.Generator().manual_seed(0))
    directory = place / f"{family}-{layers}"
    directory.mkdir()
    save_weights(decoder, directory)
    write_architecture(architecture, directory)
    return directory


def kept_bytes(model: Any, parameters: list[torch.Tensor], dtype: str = "float32") -> int:
    """Of one pass, without the parameters and what autocast makes of them."""
    known = {each.untyped_storage().data_ptr() for each in parameters}
    shapes = {each.shape for each in parameters} | {each.t().shape for each in parameters if each.dim() == 2}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.shape not in shapes:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    spans = [Span(np.arange(TOKENS + 1) % 64, np.arange(1, TOKENS + 1), 0)]
    (part,) = model.passes(spans, TOKENS)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.scores(part, torch.ones(TOKENS))
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_the_decoder_keeps_what_is_planned(family: str, dtype: str, tmp_path: Path) -> None:
    found = []
    for layers in (2, 4):
        directory = written(tmp_path, family, layers)
        architecture = read_architecture(directory)
        assert read_shape(directory).parameters == parameter_count(architecture) == stored_parameters(directory)
        model = PackedDecoder(architecture)
        model.load(directory)
        found.append(kept_bytes(model, list(model.decoder.parameters.values()), dtype))
    planned = layer_token_bytes(read_shape(directory), Training(TOKENS, dtype=dtype))
    assert (found[1] - found[0]) / 2 / TOKENS == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_transformers_keeps_what_is_planned(family: str, tmp_path: Path) -> None:
    found = []
    for layers in (2, 4):
        directory = written(tmp_path, family, layers)
        model = ShardedModel(directory, Ranks(1, 1), torch.device("cpu"))
        found.append(kept_bytes(model, list(model.module.parameters())))
    planned = layer_token_bytes(read_shape(directory), Training(TOKENS, Ranks(1, 1)))
    assert (found[1] - found[0]) / 2 / TOKENS == pytest.approx(planned, rel=0.01)
