"""Log-probs from a plain causal pass over one whole sequence, to compare with whatever packs and shares."""

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.training.engine import TrainingEngine
from areal.engine.training.packing import Span


def plain_logprobs(engine: TrainingEngine, span: Span, temperature: float) -> Tensor:
    """Those of the asked tokens, under the present weights."""

    def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(0, 1)

    ids = torch.from_numpy(span.ids)
    with torch.no_grad():
        hidden = engine.decoder.hidden(ids, torch.arange(len(ids)), causal)
        logprobs = (engine.decoder.logits(hidden) / temperature).log_softmax(1)
    return logprobs[span.asked - 1, ids[span.asked]]
