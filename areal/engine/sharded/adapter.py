"""What one rank does when an adapter is trained: the model is sharded and frozen, the adapter is whole on every rank.

Each rank's gradient is that of its share, and with tensor parallelism of its part of every matrix product. Their sum is
the gradient, so all ranks take the same step; rank 0 writes what is published and saved.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.engine_api import WeightUpdate
from areal.config.parallel import Ranks
from areal.config.training import LoraConfig, OptimizerConfig
from areal.engine.model.adapter import adapter_writer, base_digest, save_adapter
from areal.engine.model.device import to_host
from areal.engine.model.published import WeightWriter
from areal.engine.sharded.learner import RankLearner
from areal.engine.sharded.model import ShardedModel
from areal.engine.training.adamw import AdamW
from areal.engine.training.engine import TokenBatch, sum_of_squares
from areal.engine.training.lora import AdapterParameters, open_parameters
from areal.engine.training.moments import KINDS, Moments, load_moments, save_moments


class AdapterLearner(RankLearner):
    def __init__(
        self,
        model: ShardedModel,
        parameters: AdapterParameters,
        ranks: Ranks,
        optimizer: OptimizerConfig,
        *,
        base_name: str,
        total_steps: int,
        max_tokens_per_mb: int,
    ) -> None:
        """`model` is frozen; `base_name` is what the adapter's files call it."""
        self.parameters = parameters
        self._base_name = base_name
        self._switch = model.adapt(parameters.layers, parameters.config.scale)
        self.digest = base_digest(model.named_weights())
        super().__init__(model, ranks, optimizer, total_steps=total_steps, max_tokens_per_mb=max_tokens_per_mb)

    @classmethod
    def open(
        cls,
        model: ShardedModel,
        lora: LoraConfig,
        ranks: Ranks,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        base_name: str,
        total_steps: int,
        max_tokens_per_mb: int,
    ) -> "AdapterLearner":
        """With a new adapter, or the one that the config begins with."""
        linear = model.linear_weights()
        parameters = open_parameters(lora, linear, model.head_layer, seed=seed, device=model.device)
        sizes = {"total_steps": total_steps, "max_tokens_per_mb": max_tokens_per_mb}
        learner = cls(model, parameters, ranks, optimizer, base_name=base_name, **sizes)
        if lora.path:
            parameters.load(Path(lora.path).expanduser(), learner.digest)
        return learner

    def base_scores(self, batch: TokenBatch) -> Tensor:
        """One number for every trained token of the share from the model without the adapter."""
        with self._switch.off():
            return self.scores(batch)

    def save(self, directory: Path) -> None:
        """Rank 0 writes the adapter and its moments, as one process does."""
        if dist.get_rank() == 0:
            config, layers = self.parameters.config, self.parameters.layers
            save_adapter(directory, config, layers, base=self._base_name, digest=self.digest)
            save_moments(directory, self._moments())

    def load(self, directory: Path) -> None:
        """Take those of a checkpoint that ranks or one process have written."""
        self.parameters.load(directory, self.digest)
        loaded, state = load_moments(directory, self._moments()), self.optimizer.state[self._leaf]
        state["step"].fill_(float(loaded.steps))
        for kind in KINDS:
            for name, view in self.parameters.named_views(state[kind]):
                view.copy_(loaded.named[kind][name])

    def _moments(self) -> Moments:
        state = self.optimizer.state[self._leaf]
        named = {kind: dict(self.parameters.named_views(to_host(state[kind])[0].clone())) for kind in KINDS}
        return Moments(int(state["step"]), named)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self._config
        self._leaf = self.parameters.flat.detach().requires_grad_()
        self._leaf.grad = self.parameters.flat_grad
        settings: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True}
        optimizer = AdamW([self._leaf], lr=config.lr, weight_decay=config.weight_decay, **settings)
        # As `RankLearner` does: a checkpoint may come before the first step.
        moments = {kind: torch.zeros_like(self._leaf, requires_grad=False) for kind in KINDS}
        optimizer.state[self._leaf] = {"step": torch.tensor(0.0, device=self._leaf.device), **moments}
        return optimizer

    def _clear_gradient(self) -> None:
        self.parameters.flat_grad.zero_()

    def _backward(self, loss: Tensor) -> None:
        """FSDP has no part in it, which would take means."""
        if loss.requires_grad:  # else this rank leaves all of it to another (transformers/low_rank.py)
            loss.backward()

    def _gradient_norm(self) -> float:
        """After the gradient has been summed over all ranks."""
        dist.all_reduce(self.parameters.flat_grad)
        return math.sqrt(sum_of_squares(self.parameters.flat_grad))

    def _step(self, rate: float, norm: float) -> None:
        limit = self._config.gradient_clipping
        if 0 < limit < norm:
            self.parameters.flat_grad.mul_(limit / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


class RankAdapterWriter:
    """A rank's half of publishing an adapter, which is rank 0's alone."""

    def __init__(self, learner: AdapterLearner, directory: Path, source: str) -> None:
        """`source`: where other hosts fetch the file; empty = there are none."""
        self._directory = directory
        self._source = source
        self._writer: WeightWriter | None = None
        if dist.get_rank() == 0:
            parameters = learner.parameters
            self._writer = adapter_writer(directory, parameters.config, parameters.layers, learner.digest)

    def write(self, version: int) -> WeightUpdate:
        if self._writer is None:
            return WeightUpdate(version, "", str(self._directory / str(version % 2)), (), "adapter")
        written = self._writer.write(version)
        return replace(written, shards=tuple(replace(shard, source=self._source) for shard in written.shards))
