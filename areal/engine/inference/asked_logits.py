"""What some requests ask of logits beyond a token: to be changed before the draw, and to name the likeliest after it.

Both look only at the rows of sequences that ask, so the others cost nothing. Shapes: B sequences, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from areal.engine.inference.sampler import Sampled, SamplingParams
from areal.engine.inference.sequence import SequenceState
from areal.engine.model.device import to_device, to_host


@torch.inference_mode()
def steered(logits: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
    """The logits [B,V] with what each sequence adds to its own; the same tensor if none adds anything."""
    changed = [row for row, sequence in enumerate(sequences) if sequence.steering is not None]
    if not changed:
        return logits
    logits = logits.clone()
    for row in changed:
        added = _added(sequences[row])
        if added:
            tokens = to_device(torch.tensor(list(added)), logits.device)
            logits[row, tokens] += to_device(torch.tensor(list(added.values()), dtype=logits.dtype), logits.device)
    return logits


def _added(sequence: SequenceState) -> dict[int, float]:
    steering = sequence.steering
    assert steering is not None
    added = dict(steering.bias)
    if steering.frequency_penalty or steering.presence_penalty:
        for token, count in Counter(sequence.ids[sequence.prompt_length :]).items():
            penalty = steering.presence_penalty + count * steering.frequency_penalty
            added[token] = added.get(token, 0.0) - penalty
    return added


@torch.inference_mode()
def tell_alternatives(
    logits: Tensor,
    params: SamplingParams,
    sequences: Sequence[SequenceState],
    sampled: Sampled,
    banned: Tensor | None,
) -> None:
    """Give each sequence that asks the likeliest tokens in the place of the one that was drawn.

    Their log-probs are those of the distribution that was drawn from: temperature-scaled, without what is `banned` or
    not in the row's set. So there may be fewer than were asked for. The drawn token among them has the very number that
    the sampler reports.
    """
    asking = [row for row, sequence in enumerate(sequences) if sequence.top_logprobs]
    if not asking:
        return
    most = max(sequences[row].top_logprobs for row in asking)
    rows = to_device(torch.tensor(asking), logits.device)
    scaled = logits[rows] / params.on(logits.device).temperatures[rows, None]
    if banned is not None:
        scaled = scaled.masked_fill(banned[rows], -torch.inf)
    for place, row in enumerate(asking):
        if row in sampled.sets:
            left = to_device(torch.from_numpy(sampled.sets[row]).long(), logits.device)
            scaled[place] = torch.full_like(scaled[place], -torch.inf).index_copy_(0, left, scaled[place, left])
    found, tokens = to_host(*scaled.log_softmax(dim=-1).topk(most, dim=-1))
    for row, likely, values in zip(asking, tokens.tolist(), found.tolist(), strict=True):
        count, drawn = sequences[row].top_logprobs, sampled.tokens[row]
        pairs = zip(likely[:count], values[:count], strict=True)
        told = {token: logprob for token, logprob in pairs if logprob > -math.inf}
        if drawn in told:
            told[drawn] = sampled.logprobs[row]
        sequences[row].alternatives.append(told)
