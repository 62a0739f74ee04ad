"""What the sequences of a batch may not draw, as one tensor. A sequence whose grammar fails is ended here, alone."""

import numpy as np
import torch

from areal.api.errors import RequestError
from areal.api.messages import Array
from areal.engine.sequence import Sequence


def banned_tokens(sequences: list[Sequence], logits: torch.Tensor) -> torch.Tensor | None:
    """What each may not draw [B,V]; None when everybody may draw anything."""
    rows: list[int] = []
    masks: list[Array] = []
    for row, sequence in enumerate(sequences):
        try:
            mask = sequence.banned(logits.shape[1])
        except RequestError as error:  # the fault of its own grammar: the others go on
            if not sequence.done.done():
                sequence.done.set_exception(error)
            continue
        if mask is not None:
            rows.append(row)
            masks.append(mask)
    if not rows:
        return None
    banned = torch.zeros_like(logits, dtype=torch.bool)
    banned[rows] = torch.from_numpy(np.stack(masks))
    return banned
