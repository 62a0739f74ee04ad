"""Random models small enough for a test, peaked enough that their choices mean something."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from areal.config.training import OptimizerConfig
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.model.architecture import Architecture
from areal.engine.model.decoder import Decoder, initialise
from areal.engine.training.engine import TrainingEngine

TINY = Architecture(
    family="qwen3",
    vocab_size=272,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=32,
    max_positions=4096,
    tied_embeddings=True,
)
"""A vocabulary of bytes and the template's special tokens, and a few ids that no text has."""


def randomise(decoder: Decoder, seed: int = 1) -> None:
    """Weights of which every one matters: norms are not 1, biases not 0, and some tokens are likelier than others."""
    generator = torch.Generator().manual_seed(seed)
    initialise(decoder, generator)
    with torch.no_grad():
        decoder.flat *= torch.where(decoder.flat.abs() < 0.5, 10.0, 1.0)
        decoder.flat += 0.05 * torch.randn(decoder.flat.shape, generator=generator)


def training_engine(architecture: Architecture = TINY, seed: int = 1, **options: Any) -> TrainingEngine:
    optimizer = options.pop("optimizer", OptimizerConfig(lr=1e-2, warmup_steps=0))
    engine = TrainingEngine(architecture, optimizer, total_steps=100, **options)
    randomise(engine.decoder, seed)
    return engine


@cache
def byte_tokenizer() -> Any:
    """One token per byte."""
    return make_tokenizer(["Sort 5291"], 261, TINY.max_positions)


def write_model(directory: Path, **changes: Any) -> Path:
    """A model directory with random weights and a tokenizer."""
    training_engine(replace(TINY, **changes)).save(str(directory))
    byte_tokenizer().save_pretrained(directory)
    return directory
