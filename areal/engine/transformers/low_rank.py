"""Linear layers of a transformers model that compute with W + scale · B A, also where W is spread over ranks.

A hook adds scale · B A x to what a layer returns. Where tensor parallelism gives a rank only some of a layer's rows or
columns, the hook takes the same ones of B or of A; the matrices themselves are whole on every rank. The gradient of a
rank is then a part, and the sum over all ranks the whole: what several would compute alike, only the first one does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from areal.engine.model.adapter import LowRank
from areal.engine.model.low_rank import Switch, low_rank_product


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that compute each matrix product together."""

    group: Any
    size: int
    index: int
    """Of this rank among them."""

    def own(self, whole: int) -> slice:
        """What this rank has of so many rows or columns."""
        each = -(-whole // self.size)
        return slice(min(whole, self.index * each), min(whole, (self.index + 1) * each))


def adapt_module(
    module: nn.Module, layers: Mapping[str, LowRank], scale: float, tensor: TensorGroup | None = None
) -> Switch:
    """Have the linear layers of these names computed with their matrices. `tensor`: None = layers are whole."""
    switch = Switch()
    modules = dict(module.named_modules())
    for name, (a, b) in layers.items():
        adaptation = _Adaptation(a, b, scale, switch, tensor)
        modules[name].register_forward_hook(adaptation)
    return switch


def head_layer(module: Any) -> str:
    """The name of the layer that gives logits; empty = the model has none."""
    head = module.get_output_embeddings()
    return next((name for name, each in module.named_modules() if each is head), "")


class _Adaptation:
    """A forward hook of one layer."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, switch: Switch, tensor: TensorGroup | None) -> None:
        self._a, self._b = a, b
        self._scale = scale
        self._switch = switch
        self._tensor = tensor

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not self._switch.on:
            return output
        x = inputs[0].to(output.dtype)
        if self._tensor is None:
            added = low_rank_product(x, self._a, self._b)
        else:
            added = self._of_ranks(self._tensor, x, self._a.to(x.dtype), self._b.to(x.dtype), output.shape[-1])
        return torch.add(output, added, alpha=self._scale)

    def _of_ranks(self, tensor: TensorGroup, x: Tensor, a: Tensor, b: Tensor, rows: int) -> Tensor:
        """The same where `x` may be some columns of the input, or the output some rows of the whole."""
        is_first, has_columns, has_rows = tensor.index == 0, x.shape[-1] < a.shape[1], rows < b.shape[0]
        if has_rows:
            x, b = _SummedBackward.apply(x, tensor.group), b[tensor.own(b.shape[0])]  # type: ignore[no-untyped-call]
        elif not is_first:
            b = b.detach()
        if has_columns:
            part = functional.linear(x, a[:, tensor.own(a.shape[1])])
            inner = _SummedForward.apply(part, tensor.group)  # type: ignore[no-untyped-call]
        else:
            inner = functional.linear(x, a if has_rows or is_first else a.detach())
        return functional.linear(inner, b)


class _SummedForward(torch.autograd.Function):
    """Ranks compute parts of a sum, and all of them need it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        return given, None


class _SummedBackward(torch.autograd.Function):
    """All ranks take the same, and each finds a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, same: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return same.view_as(same)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        whole = given.clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
