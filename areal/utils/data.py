"""Join the tensor dicts that workflows return, batch first, into one.

Which fields a dict has, and how one is built and checked, is written in `areal.trajectory.tensors`. This module knows
only what padding needs: the fields whose padding must not be mistaken for data.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = {"attention_mask": 0, "loss_mask": 0, "versions": -1, "completion_index": -1, "temperatures": 1}
"""Fields that are padded with this value instead of `pad_value`, which would mean something in them."""


def concat_padded_tensors(dicts: Sequence[dict[str, Any]], pad_value: float = 0) -> dict[str, Any]:
    """Join tensor dicts along the batch, padding [B, L, …] tensors on the right to the longest L.

    Lists with an entry per row, like `images`, are joined as lists. A dict that has `input_ids` but no `attention_mask`
    gets one that is all true, which tells tokens from padding.
    """
    if not dicts:
        raise ValueError("concat_padded_tensors needs at least one dict, got none")
    filled = [_with_attention_mask(each) for each in dicts]
    keys = list(filled[0])
    for each in filled:
        if set(each) != set(keys):
            raise ValueError(f"every dict must have the same keys, got {sorted(keys)} and {sorted(each)}")
    return {key: _joined(key, [each[key] for each in filled], pad_value) for key in keys}


def _with_attention_mask(tensors: dict[str, Any]) -> dict[str, Any]:
    if "input_ids" not in tensors or "attention_mask" in tensors:
        return tensors
    return {**tensors, "attention_mask": torch.ones_like(tensors["input_ids"], dtype=torch.bool)}


def _joined(key: str, values: list[Any], pad_value: float) -> Any:
    if all(isinstance(value, list) for value in values):
        return [row for value in values for row in value]
    return _join(values, PADDING.get(key, pad_value))


def _join(tensors: list[Tensor], value: float) -> Tensor:
    if tensors[0].dim() < 2:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    length = max(tensor.shape[1] for tensor in tensors)
    tail = [0, 0] * (tensors[0].dim() - 2)
    return torch.cat([F.pad(tensor, [*tail, 0, length - tensor.shape[1]], value=value) for tensor in tensors])
