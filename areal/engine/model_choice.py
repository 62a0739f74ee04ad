"""How the model in a directory is computed: by this package's decoder where it can, else by transformers."""

from pathlib import Path

import torch

from areal.config.errors import require
from areal.engine.architecture import Architecture, UnknownArchitecture, read_architecture
from areal.engine.decoder import Decoder
from areal.engine.model_runner import ModelRunner
from areal.engine.packed_decoder import PackedDecoder
from areal.engine.runner import Runner
from areal.engine.trainable import TrainableModel
from areal.engine.weights import load_weights


def open_runner(directory: Path, dtype: str = "float32") -> ModelRunner:
    """The model of a directory, to generate with; `dtype` is what it is computed in."""
    architecture = _known(directory)
    if architecture is not None:
        decoder = Decoder(architecture)
        load_weights(decoder, directory)
        return Runner(decoder, dtype=getattr(torch, dtype))
    require(
        dtype == "float32",
        f"{directory.name} is computed by transformers, in float32, got rollout.dtype={dtype}; leave it out",
    )
    from areal.engine.generic.model import GenericModel
    from areal.engine.generic.runner import GenericRunner
    from areal.engine.generic.trial import may_cache

    model = GenericModel(directory)
    return GenericRunner(model, caches=may_cache(model))


def open_trainable(directory: Path, *, gradient_checkpointing: bool = False) -> TrainableModel:
    """The model of a directory, to train."""
    architecture = _known(directory)
    if architecture is not None:
        decoder = PackedDecoder(architecture, gradient_checkpointing=gradient_checkpointing)
        decoder.load(directory)
        return decoder
    require(
        not gradient_checkpointing,
        f"{directory.name} is computed by transformers, where actor.gradient_checkpointing would switch dropout on; "
        "leave it out, and lower actor.max_tokens_per_mb to save memory",
    )
    from areal.engine.generic.model import GenericModel
    from areal.engine.generic.training import GenericTraining

    return GenericTraining(GenericModel(directory, learns=True))


def max_positions(directory: Path) -> int:
    """Tokens that a sequence may have."""
    architecture = _known(directory)
    if architecture is not None:
        return architecture.max_positions
    from areal.engine.generic.config import positions_of, read_config

    return positions_of(read_config(directory))


def _known(directory: Path) -> Architecture | None:
    try:
        return read_architecture(directory)
    except UnknownArchitecture:
        return None
