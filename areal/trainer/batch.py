"""From finished groups to what the training engine takes: flat trained tokens with an advantage and a weight each."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal.algorithms.advantages import group_advantages, loss_weights
from areal.api.messages import GroupResult, Row
from areal.config.actor import ActorConfig
from areal.engine.packing import Span
from areal.engine.training import TokenBatch


@dataclass
class TrainRow:
    """A row, and where it comes from: its group, and the first of its episode's completion numbers."""

    row: Row
    group: int
    first_completion: int


def rows_of_groups(groups: Sequence[GroupResult]) -> list[TrainRow]:
    """Every row, its completions numbered through the batch."""
    rows, completions = [], 0
    for number, group in enumerate(groups):
        for episode in group.episodes:
            rows += [TrainRow(row, number, completions) for row in episode.rows]
            completions += 1 + max(int(row.completion_index.max()) for row in episode.rows)
    return rows


def token_batch(rows: Sequence[TrainRow], actor: ActorConfig) -> TokenBatch:
    """Advantages are per completion within its group, weights sum to 1 over the whole batch."""
    masks = [each.row.loss_mask for each in rows]
    counts = [int(mask.sum()) for mask in masks]

    def gather(name: str) -> Tensor:
        parts = [getattr(each.row, name)[mask] for each, mask in zip(rows, masks, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    def spread(values: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.repeat(values, counts))

    completions = gather("completion_index") + spread([each.first_completion for each in rows])
    fields = {
        "logprobs": gather("logprobs"),
        "versions": gather("versions"),
        "unreported": spread([each.row.recompute_logprobs for each in rows]),
        "advantages": _token_advantages(gather("returns"), completions, spread([each.group for each in rows]), actor),
        "weights": loss_weights(completions, actor.loss_norm),
    }
    spans = [
        Span(each.row.input_ids, np.flatnonzero(mask), each.group, tuple(each.row.images))
        for each, mask in zip(rows, masks, strict=True)
    ]
    return TokenBatch(spans, gather("temperatures"), fields)


def minibatches(batch: TokenBatch, count: int, seed: str) -> list[TokenBatch]:
    """Whole groups, dealt at random but reproducibly; within each minibatch the weights sum to 1 again."""
    groups = sorted({span.group for span in batch.spans})
    random.Random(seed).shuffle(groups)
    count = min(count, len(groups))
    home = {group: place % count for place, group in enumerate(groups)}
    parts = [_select(batch, [home[span.group] == number for span in batch.spans]) for number in range(count)]
    for part in parts:
        part.fields["weights"] = part.fields["weights"] / part.fields["weights"].sum()
    return parts


def without_zero_advantages(batch: TokenBatch) -> TokenBatch:
    """Leave out sequences that contribute no gradient; the others keep their weights."""
    counts = [len(span.asked) for span in batch.spans]
    return _select(batch, [bool(part.any()) for part in (batch.fields["advantages"] != 0).split(counts)])


def _select(batch: TokenBatch, kept: list[bool]) -> TokenBatch:
    """The sequences that are kept, with their tokens' fields."""
    tokens = torch.from_numpy(np.repeat(kept, [len(span.asked) for span in batch.spans]))
    return TokenBatch(
        [span for span, keep in zip(batch.spans, kept, strict=True) if keep],
        batch.temperatures[tokens],
        {name: values[tokens] for name, values in batch.fields.items()},
    )


def _token_advantages(returns: Tensor, completions: Tensor, groups: Tensor, actor: ActorConfig) -> Tensor:
    numbers, index = torch.unique(completions, return_inverse=True)
    first = torch.full((len(numbers),), len(completions)).scatter_reduce(
        0, index, torch.arange(len(completions)), "amin"
    )
    advantages = group_advantages(returns[first], groups[first], actor.group_baseline, actor.adv_norm)
    return advantages[index]
