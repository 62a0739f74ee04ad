"""Find out whether keys and values of an architecture can be kept in slots: compute a little both ways and compare."""

from collections.abc import Iterator

import torch
from torch import Tensor

from areal.engine.generic.model import GenericModel
from areal.engine.generic.runner import GenericRunner
from areal.utils.logging import getLogger

logger = getLogger("engine")

TOLERANCE = 1e-3
"""Of the logits' own spread: what two ways of computing the same may differ by."""


def may_cache(model: GenericModel) -> bool:
    """Whether slots give the logits that computing anew gives."""
    if _looks_elsewhere(model):
        return False
    try:
        differs = max(_differences(model))
    except Exception as error:  # an architecture may object to a cache that is not its own in any way it likes
        logger.info("keys and values of this architecture are not cached: %r", error)
        return False
    if differs > TOLERANCE:
        logger.info("keys and values of this architecture are not cached: logits would differ by %.1e", differs)
    return differs <= TOLERANCE


def _looks_elsewhere(model: GenericModel) -> bool:
    """Whether some layer does not look back at everything; a short trial would not show it."""
    config = model.module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return bool(kinds - {"full_attention"}) or (window is not None and window < model.max_positions)


def _differences(model: GenericModel) -> Iterator[float]:
    """How much logits differ along sequences of different length, one with a picture."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return model.as_text(torch.randint(model.vocab_size, (count,), generator=draw))

    runners = [GenericRunner(model, caches=caches) for caches in (False, True)]
    places, shown = ([], ()) if model.pictures is None else model.pictures.example()
    prompts, images = [[*tokens(2), *places, *tokens(9)], tokens(5), tokens(8)], [shown, (), ()]
    yield _share(*(runner.prefill(range(3), prompts, images) for runner in runners))
    for step in range(3):
        new, positions = tokens(3), [len(prompt) + step for prompt in prompts]
        yield _share(*(runner.decode(new, positions) for runner in runners))


def _share(expected: Tensor, got: Tensor) -> float:
    """The largest difference, as a share of the logits' spread."""
    expected, got = (logits.masked_fill(logits == -torch.inf, 0.0) for logits in (expected, got))
    return float((expected - got).abs().max() / expected.std())
