"""A group as the tensor dict that users know: batch first, padded on the right."""

from typing import Any

import torch
from torch import Tensor

from areal.api.messages import GroupResult, Row
from areal.utils.data import concat_padded_tensors

FIELDS = ("input_ids", "loss_mask", "logprobs", "versions", "returns", "completion_index", "temperatures")


def tensors_of(group: GroupResult) -> dict[str, Any]:
    """Every row of every episode; `group_id` is the task's number. Where there are pictures, `images` has them."""
    rows = [row for episode in group.episodes for row in episode.rows]
    tensors = concat_padded_tensors([_tensors(row) for row in rows])
    tensors["group_id"] = torch.full((len(rows),), group.task_id)
    if any(row.images for row in rows):
        tensors["images"] = [row.images for row in rows]
    return tensors


def _tensors(row: Row) -> dict[str, Tensor]:
    tensors = {name: torch.from_numpy(getattr(row, name)).unsqueeze(0) for name in FIELDS}
    return {**tensors, "rewards": torch.tensor([row.reward])}
