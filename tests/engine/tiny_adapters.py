"""Random LoRA matrices, and what they make of a model, computed apart from the package."""

import torch

from areal.engine.model.adapter import AdapterConfig, LowRank
from areal.engine.training.engine import TrainingEngine


def low_rank(model: TrainingEngine, config: AdapterConfig, seed: int) -> dict[str, LowRank]:
    """Random matrices that change a model's choices."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, weight in model.model.named_weights():
        layer = name.removesuffix(".weight")
        if weight.dim() == 2 and config.targets(layer):
            rows, columns = weight.shape
            a, b = (torch.randn(shape, generator=generator) for shape in ((config.r, columns), (rows, config.r)))
            layers[layer] = (a * 0.3, b * 0.3)
    assert layers
    return layers


def merge_by_hand(model: TrainingEngine, config: AdapterConfig, layers: dict[str, LowRank]) -> None:
    """In float64."""
    with torch.no_grad():
        for name, weight in model.model.named_weights():
            if (layer := name.removesuffix(".weight")) in layers:
                a, b = (each.double() for each in layers[layer])
                weight.copy_(weight.double() + config.lora_alpha / config.r * (b @ a))
