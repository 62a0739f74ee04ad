"""Two operations of a decoder with gradients of their own.

torch takes the gradient of each of the small operations that they consist of on a CPU: in a dozen passes over memory
where three are enough, and by keeping what is quickly computed again.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T,…,D] by the root of the mean square of its last dimension, times `weight` […,D]; in the latter's dtype."""
    found: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return found


def gated(gate_up: Tensor) -> Tensor:
    """[T,2F] -> [T,F]: the first half's SiLU times the second half."""
    found: Tensor = _Gated.apply(gate_up)  # type: ignore[no-untyped-call]
    return found


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.to(weight.dtype)
        scale = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (exact * scale).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        """With s the scale: dx = s w dy - x s³ mean(w dy x), and dw = the sum over tokens of s x dy."""
        x, weight, scale = ctx.saved_tensors
        exact = x.to(weight.dtype)
        products = given * exact
        along = torch.linalg.vecdot(products, weight).unsqueeze(-1)
        of_weight = torch.einsum("t...d,t...->...d", products, scale.squeeze(-1))
        shrinking = along.mul_(scale.pow(3)).div_(-x.shape[-1])
        of_x = torch.addcmul((given * weight).mul_(scale), exact, shrinking)
        return of_x.to(x.dtype), of_weight, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        found = torch.empty_like(gate_up)
        of_gate, of_up = found.chunk(2, dim=-1)
        torch.mul(F.silu(gate), given, out=of_up)
        torch.ops.aten.silu_backward.grad_input(given * up, gate, grad_input=of_gate)
        return found
