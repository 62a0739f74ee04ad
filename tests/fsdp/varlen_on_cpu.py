"""What torch's flash attention for sequences of various lengths computes, in its own signature, on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor


def varlen_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    left, right = window_size
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key))
    assert (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max())) == (max_q, max_k)
    outputs = []
    for q, k, v in zip(*(_cut(*each) for each in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))), strict=True):
        places = torch.arange(len(k) - len(q), len(k))[:, None]  # queries are the last of their sequence
        offset = torch.arange(len(k)) - places
        seen = (offset <= right) & ((offset >= -left) | torch.tensor(left < 0))
        heads = (each.transpose(0, 1) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(mixed.transpose(0, 1))
    return torch.cat(outputs)


def _cut(tensor: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = tensor.split(ends.diff().tolist())
    return parts
