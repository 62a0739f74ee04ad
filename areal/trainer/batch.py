"""Finished groups as one flat batch of trained tokens, and its parts.

A token has the fields that stages compare and weigh by. Groups, completions and episodes are numbered through the
batch, so how they lie in rows does not matter.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from areal.algorithms.advantage import group_advantages, overlong_penalties
from areal.algorithms.stages import stage
from areal.api.errors import ArealError
from areal.api.messages import Array, GroupResult, Row, TrainedRow
from areal.config.algorithm import Algorithm, find_function
from areal.engine.training.choices import ChoiceReader
from areal.engine.training.engine import TokenBatch
from areal.engine.training.packing import Span
from areal.engine.training.token_sets import FIELD
from areal.trainer.critic import ValueUpdate

TokenValues = Sequence[tuple[Tensor, Tensor]]
"""Numbers of trained tokens, counted through the rows of a batch, and a value for each; part by part."""


@dataclass
class TrainRow:
    row: Row
    group: int
    """Its task's place in the batch."""
    peers: int
    """The number, through the batch, of the group it is compared within: its task's, or one of several in it."""
    first_completion: int
    """The number, through the batch, of the first completion of the row's episode."""
    episode: int
    """Its episode's place in the batch."""


def rows_of_groups(groups: Sequence[GroupResult]) -> list[TrainRow]:
    """Every row, its completions and the groups that are compared numbered through the batch."""
    episodes = [(number, episode.rows) for number, group in enumerate(groups) for episode in group.episodes]
    if not episodes:
        return []
    numbers = [row.completion_index for _, rows in episodes for row in rows]
    starts = _starts([sum([len(row.completion_index) for row in rows]) for _, rows in episodes])
    completions = _starts(np.maximum.reduceat(np.concatenate(numbers), starts) + 1).tolist()
    peers: dict[tuple[int, int | None], int] = {}
    return [
        TrainRow(row, number, peers.setdefault((number, row.group_id), len(peers)), first, episode)
        for episode, ((number, rows), first) in enumerate(zip(episodes, completions, strict=True))
        for row in rows
    ]


def token_batch(rows: Sequence[TrainRow], choices: ChoiceReader | None = None) -> TokenBatch:
    """Every trained token with what is known of it before anything is computed.

    `choices`: reads what tokens were drawn from; None = only what needs no tokenizer can be read.
    """
    lengths = [len(each.row.loss_mask) for each in rows]
    trained = np.flatnonzero(np.concatenate([each.row.loss_mask for each in rows]))
    ends = np.searchsorted(trained, np.cumsum(lengths))
    counts = np.diff(ends, prepend=0)

    def gather(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(each.row, name) for each in rows])[trained])

    def spread(values: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.repeat(values, counts))

    places = trained - np.repeat(_starts(lengths), counts)
    truncated = np.concatenate([each.row.truncated_tokens() for each in rows])[trained]
    fields = {
        "tokens": torch.arange(len(trained)),
        "completions": gather("completion_index") + spread([each.first_completion for each in rows]),
        "episodes": spread([each.episode for each in rows]),
        "peers": spread([each.peers for each in rows]),
        "positions": torch.from_numpy(places),
        "returns": gather("returns"),
        "truncated": torch.from_numpy(truncated),
        "behaviour": gather("logprobs"),
        "versions": gather("versions"),
        "unreported": spread([each.row.recompute_logprobs for each in rows]),
    }
    spans = [
        Span(each.row.input_ids, places[begin:end], each.group, tuple(each.row.images))
        for each, (begin, end) in zip(rows, pairwise((0, *ends.tolist())), strict=True)
    ]
    batch = TokenBatch(spans, gather("temperatures"), fields)
    if found := (choices or ChoiceReader()).read([each.row for each in rows]):
        batch.sets, fields[FIELD] = found
    return batch


def token_parents(batch: TokenBatch, rows: Sequence[TrainRow], groups: Sequence[GroupResult]) -> Tensor:
    """The completion that each token's one continues, numbered through the batch [N]; -1 = it began a conversation.

    Raises ArealError where an episode has several and nobody knows which follows which.
    """
    firsts = {each.episode: each.first_completion for each in rows}
    total = max((each.first_completion + int(each.row.completion_index.max()) + 1 for each in rows), default=0)
    episodes = [episode for group in groups for episode in group.episodes]
    parents: list[int] = []
    for episode, (first, end) in zip(episodes, pairwise([*firsts.values(), total]), strict=True):
        count = end - first
        if count > 1 and len(episode.nodes) < count:
            raise ArealError(
                f"actor.gae_over=episode needs to know which turn follows which, and an episode of {count} "
                "completions came without that: its workflow returned tensors, or conversations of several clients; "
                "set actor.gae_over=completion"
            )
        known = [-1 if node.parent is None else first + node.parent for node in episode.nodes[:count]]
        parents += known or [-1]
    return torch.tensor(parents, dtype=torch.int64)[batch.fields["completions"]]


def with_advantages(
    batch: TokenBatch, algorithm: Algorithm, max_new_tokens: int, critic: ValueUpdate | None = None
) -> TokenBatch:
    """Advantages are taken by the algorithm's stage, of returns or of what a critic's values leave of them."""
    fields = batch.fields
    returns, completions = fields["returns"], fields["completions"]
    if algorithm.overlong_share:
        lengths = completion_tokens(completions)
        costs = overlong_penalties(lengths, max_new_tokens, algorithm.overlong_share)
        returns = (returns.double() - costs).to(returns.dtype)
    if critic is not None:
        returns = critic.advantages(batch, returns, algorithm.discount, algorithm.gae_lambda)
    own = find_function("advantage", algorithm.advantage)
    if own is None:
        advantages = group_advantages(
            returns, fields["peers"], algorithm.group_baseline, algorithm.adv_norm, completions, fields["episodes"]
        )
    else:
        advantages = own(returns, fields["peers"], completions, fields["episodes"])
    return replace(batch, fields={**fields, "advantages": advantages.to(returns.dtype)})


def completion_tokens(completions: Tensor) -> Tensor:
    """How many tokens the completion of each has [N]."""
    _, index, counts = torch.unique(completions, return_inverse=True, return_counts=True)
    return counts[index]


def without_truncated(batch: TokenBatch) -> TokenBatch:
    """Leave out completions that ended for length. Their rewards have counted for the advantages of the others."""
    return select(batch, ~batch.fields["truncated"])


def without_forced(batch: TokenBatch) -> TokenBatch:
    """Leave out tokens that there was no choice of: whatever the weights, they would have been drawn.

    The rewards of their completions have counted for the advantages of the others.
    """
    return batch if batch.sets is None else select(batch, ~batch.sets.single[batch.fields[FIELD]])


def trained_rows(
    rows: Sequence[TrainRow], logprobs: TokenValues, advantages: TokenValues, entropies: TokenValues
) -> list[TrainedRow]:
    """What was computed for the tokens of each row; NaN where nothing was."""
    ends = np.cumsum([0, *(np.count_nonzero(each.row.loss_mask) for each in rows)]).tolist()

    def by_row(computed: TokenValues) -> list[Array]:
        whole = np.full(ends[-1], np.nan, np.float32)
        for tokens, values in computed:
            whole[tokens.numpy()] = values.numpy()
        return [whole[begin:end] for begin, end in pairwise(ends)]

    columns = [by_row(computed) for computed in (advantages, logprobs, entropies)]
    return [TrainedRow(*each) for each in zip(*columns, strict=True)]


def minibatches(batch: TokenBatch, count: int, seed: str, algorithm: Algorithm) -> list[TokenBatch]:
    """Whole groups, dealt at random but reproducibly, each with weights of its own."""
    groups = sorted({span.group for span in batch.spans})
    random.Random(seed).shuffle(groups)
    count = max(1, min(count, len(groups)))
    home = {group: place % count for place, group in enumerate(groups)}
    homes = _per_token(batch, [home[span.group] for span in batch.spans])
    parts = [select(batch, homes == number) for number in range(count)]
    weigh = stage("loss_norm", algorithm.loss_norm)
    for part in parts:
        weights = weigh(part.fields["completions"], part.fields["episodes"], algorithm)
        part.fields["weights"] = weights.to(part.fields["behaviour"].dtype)
    return parts


def useful_tokens(batch: TokenBatch) -> Tensor:
    """Which tokens are of sequences that contribute a gradient [N], bool: those with tokens of a completion that has an
    advantage somewhere."""
    completions = batch.fields["completions"]
    number = _per_token(batch, range(len(batch.spans)))
    useful = torch.zeros(len(batch.spans), dtype=torch.bool)
    useful[number[torch.isin(completions, completions[batch.fields["advantages"] != 0])]] = True
    return useful[number]


def has_split_completions(batch: TokenBatch) -> bool:
    """Whether some completion has tokens in several sequences, so maybe in several passes."""
    completions = batch.fields["completions"]
    pairs = completions * len(batch.spans) + _per_token(batch, range(len(batch.spans)))
    return len(torch.unique(pairs)) > len(torch.unique(completions))


def select(batch: TokenBatch, kept: Tensor) -> TokenBatch:
    """The tokens that are kept, and the sequences that have any."""
    if not batch.spans or bool(kept.all()):
        return replace(batch, spans=_with_any(batch.spans), fields=dict(batch.fields))
    places = np.flatnonzero(kept.numpy())
    asked = np.concatenate([span.asked for span in batch.spans])[places]
    counts = [len(span.asked) for span in batch.spans]
    ends = np.searchsorted(places, np.cumsum(counts)).tolist()
    spans = [
        span if end - begin == count else Span(span.ids, asked[begin:end], span.group, span.images)
        for span, count, (begin, end) in zip(batch.spans, counts, pairwise((0, *ends)), strict=True)
        if end > begin
    ]
    index = torch.from_numpy(places)
    fields = {name: values[index] for name, values in batch.fields.items()}
    return replace(batch, spans=spans, temperatures=batch.temperatures[index], fields=fields)


def _with_any(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if len(span.asked)]


def _starts(lengths: Sequence[int] | Array) -> Array:
    """Where each of consecutive parts begins."""
    return np.cumsum(lengths) - lengths


def _per_token(batch: TokenBatch, values: Sequence[int]) -> Tensor:
    """Each sequence's value on all its trained tokens."""
    counts = [len(span.asked) for span in batch.spans]
    return torch.from_numpy(np.repeat(np.asarray(values, np.int64), counts))
