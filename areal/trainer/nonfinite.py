"""What a run does with an update whose loss or gradient is not a finite number: `actor.on_nonfinite`.

The engine has changed nothing when it reports one. `stop` saves the batch for debugging, writes a checkpoint
(the run does, as at every error) and ends the run; `skip` leaves the update out and counts it.
"""

from pathlib import Path

import numpy as np
from torch import Tensor

from areal.api.errors import NonFiniteUpdate
from areal.config.training import ActorConfig
from areal.engine.training.engine import Loss, TokenBatch
from areal.engine.training.figures import Figures
from areal.engine.training.learner import Trained
from areal.utils.logging import getLogger

logger = getLogger("trainer")


def guarded_update(
    engine: Trained,
    batch: TokenBatch,
    loss: Loss,
    actor: ActorConfig,
    *,
    place: int,
    step: int,
    directory: Path | None,
    of_critic: bool = False,
    scores: Tensor | None = None,
    entropies: Tensor | None = None,
) -> Figures:
    """`engine.train_batch` with `skipped_updates` among its figures.

    `step` counts from 1; `directory`: where a batch is saved, None = nowhere.
    """
    when = f"step {step}, critic" if of_critic else f"step {step}"
    try:
        figures = engine.train_batch(batch, loss, place, scores=scores, entropies=entropies)
    except NonFiniteUpdate as error:
        if actor.on_nonfinite == "skip":
            logger.warning("%s: %s; the update is skipped (actor.on_nonfinite: skip)", when, error)
            return Figures(total={"skipped_updates": 1})
        saved = _saved(batch, directory, f"{'critic-' if of_critic else ''}step-{step:06d}")
        raise NonFiniteUpdate(f"{when}: {error}; {saved}; actor.on_nonfinite=skip leaves such updates out") from error
    return Figures.of_passes([figures, Figures(total={"skipped_updates": 0})])


def _saved(batch: TokenBatch, directory: Path | None, name: str) -> str:
    """Save the batch, and say where."""
    if directory is None:
        return "its batch was not saved"
    path = directory / f"nonfinite-{name}.npz"
    try:
        save_batch(path, batch)
    except OSError as error:  # the cause that is reported must stay the first one
        return f"its batch could not be saved ({error})"
    return f"its batch is saved in {path}"


def save_batch(path: Path, batch: TokenBatch) -> None:
    """Sequences one after the other with their lengths; positions of trained tokens, and their fields by name; and what
    they were drawn from, if that was limited (`TokenSets`)."""
    spans = batch.spans
    sets = {} if batch.sets is None else {f"set_{name}": each.numpy() for name, each in vars(batch.sets).items()}
    images = [image for span in spans for image in span.images]
    np.savez_compressed(
        path,
        input_ids=np.concatenate([span.ids for span in spans]),
        lengths=np.array([len(span.ids) for span in spans]),
        groups=np.array([span.group for span in spans]),
        trained_positions=np.concatenate([span.asked for span in spans]),
        trained_counts=np.array([len(span.asked) for span in spans]),
        image_bytes=np.frombuffer(b"".join(images), np.uint8),
        image_lengths=np.array([len(image) for image in images], np.int64),
        image_counts=np.array([len(span.images) for span in spans]),
        temperatures=batch.temperatures.numpy(),
        **{name: values.numpy() for name, values in batch.fields.items()},
        **sets,
    )
