"""How the model in a directory is computed: by this package's decoder where it can, else by transformers."""

from pathlib import Path

from areal.engine.architecture import Architecture, UnknownArchitecture, read_architecture
from areal.engine.decoder import Decoder
from areal.engine.model_runner import ModelRunner
from areal.engine.packed_decoder import PackedDecoder
from areal.engine.runner import Runner
from areal.engine.trainable import TrainableModel
from areal.engine.weights import load_weights


def open_runner(directory: Path) -> ModelRunner:
    """The model of a directory, to generate with."""
    architecture = _known(directory)
    if architecture is not None:
        decoder = Decoder(architecture)
        load_weights(decoder, directory)
        return Runner(decoder)
    from areal.engine.generic.model import GenericModel
    from areal.engine.generic.runner import GenericRunner
    from areal.engine.generic.trial import may_cache

    model = GenericModel(directory)
    return GenericRunner(model, caches=may_cache(model))


def open_trainable(directory: Path) -> TrainableModel:
    """The model of a directory, to train."""
    architecture = _known(directory)
    if architecture is not None:
        decoder = PackedDecoder(architecture)
        decoder.load(directory)
        return decoder
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
