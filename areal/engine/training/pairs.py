"""Pairs of answers as spans: what is asked of them, and the loss that trains them.

Spans come in twos, the chosen answer before the rejected one. The two of a pair share their prompt, which is computed
once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.engine.training.engine import TokenBatch
from areal.engine.training.figures import Figures
from areal.engine.training.packing import Span
from areal.engine.training.supervised import supervised_span

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Two conversations that begin alike and end with an assistant's turn each."""

    chosen: Messages
    rejected: Messages
    shared: int
    """So many messages are the prompt of both."""
    tools: Any = None

    @property
    def both(self) -> tuple[Messages, Messages]:
        return self.chosen, self.rejected


@dataclass(frozen=True)
class WeightedScores:
    """A `Loss`: the sum of scores, each times its field `coefficients`."""

    def __call__(self, scores: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Figures]:
        return (scores * fields["coefficients"]).sum(), Figures()


def answers_of_pairs(pairs: Sequence[Pair], tokenizer: Any) -> TokenBatch:
    """Asks for every token that the assistant says after the prompt."""
    spans = [
        supervised_span(_answering(messages, pair.shared), pair.tools, tokenizer, group=number)
        for number, pair in enumerate(pairs)
        for messages in pair.both
    ]
    return _batch(spans)


def ends_of_pairs(pairs: Sequence[Pair], tokenizer: Any) -> TokenBatch:
    """Asks for the score of every conversation."""
    spans = [
        conversation_end(messages, pair.tools, tokenizer, group=number)
        for number, pair in enumerate(pairs)
        for messages in pair.both
    ]
    return _batch(spans)


def ends_of_conversations(conversations: Sequence[tuple[Messages, Any]], tokenizer: Any) -> TokenBatch:
    """The same of messages and tools that are not paired."""
    return _batch([conversation_end(*each, tokenizer, group=number) for number, each in enumerate(conversations)])


def conversation_end(messages: Messages, tools: Any, tokenizer: Any, group: int) -> Span:
    """A conversation that ends with the assistant's turn, asked after its last token.

    That is where a sequence classifier of transformers reads its score. The id that is added to be asked for is never
    computed.
    """
    ids = supervised_span(_answering(messages, len(messages) - 1), tools, tokenizer, group).ids
    return Span(np.append(ids, ids[-1]), np.array([len(ids)]), group)


def sums_of_pairs(batch: TokenBatch, scores: Tensor) -> Tensor:
    """Of all that was asked of each conversation, in double precision: [P,2], chosen and rejected."""
    spans = torch.repeat_interleave(_lengths(batch))
    return torch.bincount(spans, scores.double(), len(batch.spans)).view(-1, 2)


def lengths_of_pairs(batch: TokenBatch) -> Tensor:
    """How many tokens are asked of each conversation [P,2]."""
    return _lengths(batch).view(-1, 2)


def spread_over_pairs(batch: TokenBatch, slopes_P2: Tensor) -> Tensor:  # noqa: N803
    """Derivatives by the sums of pairs, as those by the score of each token [N]."""
    return torch.repeat_interleave(slopes_P2.flatten(), _lengths(batch)).to(torch.float32)


def _lengths(batch: TokenBatch) -> Tensor:
    return torch.tensor([len(span.asked) for span in batch.spans])


def _batch(spans: list[Span]) -> TokenBatch:
    return TokenBatch(spans, torch.ones(sum(len(span.asked) for span in spans)))


def _answering(messages: Messages, given: int) -> Messages:
    """Of which the first `given` are not learned."""
    return [*({**message, "learn": False} for message in messages[:given]), *messages[given:]]
