"""What one rank does: its share of a batch's passes, and its part of every optimizer step.

All ranks are called alike, each with its own share. They compute equally many passes, because each pass is a collective
of all; a rank with fewer adds some whose loss is multiplied by 0. Weights were chosen for the whole batch, so
gradients and figures of the ranks add up, whoever computed what.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from areal.api.errors import NonFiniteUpdate
from areal.config.parallel import Ranks
from areal.config.training import OptimizerConfig
from areal.engine.model.device import to_host
from areal.engine.sharded.model import ShardedModel
from areal.engine.training.engine import Loss, TokenBatch, learning_rate, sum_of_squares
from areal.engine.training.figures import Figures
from areal.engine.training.head import Temperatures
from areal.engine.training.moments import KINDS
from areal.engine.training.packing import Pack
from areal.engine.training.token_sets import DrawnFrom


class RankLearner:
    def __init__(
        self,
        model: ShardedModel,
        ranks: Ranks,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        max_tokens_per_mb: int,
    ) -> None:
        self.model = model
        self._ranks = ranks
        self._config = optimizer
        self._total_steps = total_steps
        self._max_tokens = max_tokens_per_mb
        self.optimizer = self._make_optimizer()
        self._whole = [each for each in model.module.parameters() if not isinstance(each, DTensor)]
        """Parameters that every rank has whole. transformers adds up the gradients of some over the ranks in each
        backward pass, so what they hold then must be of that pass alone."""

    def scores(self, batch: TokenBatch, model: ShardedModel | None = None) -> Tensor:
        """One number for every trained token of the share under the present weights, or those of `model`."""
        model = model or self.model
        batch = batch.on(model.device)
        out = torch.empty(len(batch.temperatures), device=model.device)
        with torch.no_grad():
            for part, real in self._passes(batch, model):
                found = model.scores(part, *self._distribution(part, batch, real))
                if real:
                    out[part.order] = found
        model.reshard()
        return to_host(out)[0]

    def train_batch(self, batch: TokenBatch, loss: Loss, place: int) -> tuple[Figures, float, Tensor, Tensor]:
        """One optimizer step of all ranks.

        Returns the figures of the rank's share, the norm of the whole gradient, and the scores that its forward passes
        gave every trained token of the share, with the entropies of what these were drawn from (of a critic, NaN), on
        the host.
        Raises NonFiniteUpdate on every rank, with nothing changed, if the loss or the gradient of any is not finite.
        """
        self._clear_gradient()
        batch = batch.on(self.model.device)
        found, spread = torch.full((2, len(batch.temperatures)), torch.nan, device=self.model.device)
        parts = [Figures(mean={"loss": 0.0}, total={"forward_tokens": 0})]
        for part, real in self._passes(batch, self.model):
            own = torch.full((len(part.order),), torch.nan, device=self.model.device)
            scores = self.model.scores(part, *self._distribution(part, batch, real), own)
            if not real:
                self._backward(scores.sum() * 0.0)
                continue
            value, figures = loss(scores, {name: values[part.order] for name, values in batch.fields.items()})
            self._backward(value)
            found[part.order], spread[part.order] = scores.detach(), own
            parts += [figures, Figures(mean={"loss": value.detach()}, total={"forward_tokens": part.tokens})]
        share = Figures.of_passes(parts)
        norm = self._gradient_norm()
        losses = _sum(share["loss"])
        if not (math.isfinite(losses) and math.isfinite(norm)):
            raise NonFiniteUpdate(
                f"the loss and the gradient norm must be finite, got {losses / self._ranks.tensor} and {norm}; "
                "the weights were not changed"
            )
        self._step(learning_rate(self._config, place, self._total_steps), norm)
        return share, norm, *to_host(found, spread)

    def _clear_gradient(self) -> None:
        self.optimizer.zero_grad()

    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of a pass to that of the passes before it."""
        before = [parameter.grad for parameter in self._whole]
        for parameter in self._whole:
            parameter.grad = None
        # FSDP takes the mean over data-parallel ranks, and what is wanted is the sum.
        (loss * self._ranks.data).backward()
        for parameter, earlier in zip(self._whole, before, strict=True):
            if parameter.grad is None:
                parameter.grad = earlier
            elif earlier is not None:
                parameter.grad += earlier

    def _passes(self, batch: TokenBatch, model: ShardedModel) -> Iterator[tuple[Pack, bool]]:
        """The passes of the share, then as many empty ones as the rank with the most has more; and whether it is one.

        Packs are made as they are needed, because masks may be large: so nobody knows beforehand how many there are.
        """
        own = iter(model.passes(batch.spans, self._max_tokens) if batch.spans else ())
        while True:
            part = next(own, None)
            if not _any(part is not None):
                return
            yield (model.empty_pass(), False) if part is None else (part, True)

    def _distribution(self, part: Pack, batch: TokenBatch, real: bool) -> tuple[Temperatures, DrawnFrom | None]:
        return (batch.temperatures_at(part.order), batch.drawn_at(part.order)) if real else (1.0, None)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self._config
        parameters = list(self.model.module.parameters())
        groups = [
            {"params": [each for each in parameters if each.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, foreach=False
        )
        # A checkpoint may come before the first step. torch would make up moments for it by a step of its own, which
        # counts, or would find none if there are gradients.
        for parameter in parameters:
            moments = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in KINDS}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return optimizer

    def _gradient_norm(self) -> float:
        """Over all ranks, on any mesh: what several ranks hold counts once."""
        squares = []
        for parameter in self.model.module.parameters():
            if parameter.grad is not None:
                local, copies = _local(parameter.grad)
                squares.append(sum_of_squares(local) / copies)
        return math.sqrt(_sum(float(torch.stack(squares).sum()) if squares else 0.0))

    def _step(self, rate: float, norm: float) -> None:
        limit = self._config.gradient_clipping
        if 0 < limit < norm:
            for parameter in self.model.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


def _local(tensor: Tensor) -> tuple[Tensor, int]:
    """What this rank holds of a tensor, and how many ranks hold the same."""
    if not isinstance(tensor, DTensor):
        return tensor, dist.get_world_size()
    mesh = tensor.device_mesh
    copies = dist.get_world_size() // mesh.size()
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            copies *= mesh.size(dimension)
    return tensor.to_local(), copies


def _any(value: bool) -> bool:
    """Whether it is true on some rank."""
    found = torch.tensor(int(value))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def _sum(value: float) -> float:
    """Over all ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found)
    return float(found)
