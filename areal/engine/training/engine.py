"""What the training engine asks of a model: its weights as one buffer, and the log-probs of tokens, pass by pass."""

# MERGED-DOC
# The decoder as a model that learns: packed sequences, each shared prefix once, the head only where the loss is.
# Train a model: forward and backward passes, AdamW on the flat buffer, checkpoints, published versions.
#
# A batch is flat: the N positions whose tokens are trained, with every per-token figure as a tensor [N] beside them. The
# loss sums over positions with weights that the caller chose for the whole batch, so how the batch is cut into passes
# does not change the gradient.

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal.api.engine_api import WeightUpdate
from areal.config.training import OptimizerConfig
from areal.engine.model.architecture import Architecture, write_architecture
from areal.engine.model.decoder import Decoder, parameter_count
from areal.engine.model.weights import SharedWeights, digest, load_weights, save_weights
from areal.engine.training.figures import Figures
from areal.engine.training.packing import Pack, Span, pack


class Pass(Protocol):
    """Sequences, or parts of them, that are computed together."""

    @property
    def order(self) -> Tensor:
        """Which of the asked positions, counted through all spans, this pass computes, in its own order."""
        ...

    @property
    def tokens(self) -> int:
        """How many tokens of sequences are computed."""
        ...


class TrainableModel(Protocol):
    @property
    def flat(self) -> Tensor:
        """Every parameter, in one float32 buffer."""
        ...

    @property
    def flat_grad(self) -> Tensor:
        """Where gradients gather."""
        ...

    @property
    def matrices(self) -> int:
        """How many leading values of the buffer belong to matrices, which weight decay is for."""
        ...

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterable[Any]:
        """Cut spans into passes of at most `max_tokens` tokens (a single longer sequence gets one of its own)."""
        ...

    def logprobs(self, part: Any, temperatures: Tensor) -> Tensor:
        """Log-probability of each token that a pass asks for, in its order; differentiable."""
        ...

    def load(self, directory: Path) -> None:
        """Take the weights of a Hugging Face directory of the same architecture."""
        ...

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face's format (the tokenizer is the caller's)."""
        ...


HEAD_ELEMENTS = 1 << 24
"""Logits held at once: positions times vocabulary."""


class PackedDecoder:
    """Implements `TrainableModel`."""

    def __init__(self, architecture: Architecture, *, gradient_checkpointing: bool = False) -> None:
        """The weights are zeros, to be loaded or initialised."""
        self._gradient_checkpointing = gradient_checkpointing
        size = parameter_count(architecture)
        self.flat, self.flat_grad = torch.zeros(size), torch.zeros(size)
        self.decoder = Decoder(architecture, self.flat, self.flat_grad)
        self.matrices = sum(p.numel() for p in self.decoder.parameters.values() if p.dim() > 1)

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterator[Pack]:
        return pack(spans, max_tokens)

    def logprobs(self, part: Pack, temperatures: Tensor) -> Tensor:
        forgets = self._gradient_checkpointing and torch.is_grad_enabled()
        hidden = self.decoder.hidden(part.ids, part.positions, part.attend, forgets=forgets)[part.sources]
        rows = max(1, HEAD_ELEMENTS // self.decoder.architecture.vocab_size)
        pieces = list(zip(hidden.split(rows), part.targets.split(rows), temperatures.split(rows), strict=True))
        if len(pieces) == 1:
            return self._token_logprobs(*pieces[0])
        return torch.cat([checkpoint(self._token_logprobs, *piece, use_reentrant=False) for piece in pieces])

    def load(self, directory: Path) -> None:
        load_weights(self.decoder, directory)

    def save(self, directory: Path) -> None:
        save_weights(self.decoder, directory)
        write_architecture(self.decoder.architecture, directory)

    def _token_logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        return token_logprobs(self.decoder.logits(hidden), targets, temperatures)


def token_logprobs(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probability [n] of each target under logits [n,V] at its temperature."""
    logits = logits / temperatures[:, None]
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)


Loss = Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, Figures]]
"""(log-probs [n], per-token fields [n]) -> (summed weighted loss, figures)"""


@dataclass
class TokenBatch:
    """Sequences with the positions to train, and per-token fields [N] in the order of those positions."""

    spans: Sequence[Span]
    temperatures: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)


class TrainingEngine:
    """Weights that learn."""

    def __init__(
        self,
        model: TrainableModel | Architecture,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        max_tokens_per_mb: int = 16384,
        directory: Path | None = None,
    ) -> None:
        """An architecture is computed by the package's decoder, its weights zeros unless they come from `directory`."""
        self.model: TrainableModel = PackedDecoder(model) if isinstance(model, Architecture) else model
        self.version = 0
        self.total_steps = total_steps
        self.max_tokens_per_mb = max_tokens_per_mb
        self._config = optimizer
        self.flat, self.flat_grad = self.model.flat, self.model.flat_grad
        if directory is not None:
            self.model.load(directory)
        self._optimizer = self._make_optimizer()
        self._steps = 0
        self._shared: list[SharedWeights] = []
        self._shared_dir: Path | None = None

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probability of every trained token [N] under the present weights."""
        out = torch.empty(len(batch.temperatures))
        with torch.no_grad():
            for part in self._passes(batch):
                out[part.order] = self.model.logprobs(part, batch.temperatures[part.order])
        return out

    def train_batch(self, batch: TokenBatch, loss: Loss) -> Figures:
        """One optimizer step; returns the loss's figures and the step's own."""
        parts = []
        self.flat_grad.zero_()
        for part in self._passes(batch):
            fields = {name: values[part.order] for name, values in batch.fields.items()}
            value, figures = loss(self.model.logprobs(part, batch.temperatures[part.order]), fields)
            value.backward()
            parts += [figures, Figures(mean={"loss": value.detach()}, total={"forward_tokens": part.tokens})]
        norm = self._step()
        parts.append(Figures(mean={"grad_norm": norm, "lr": self._optimizer.param_groups[0]["lr"]}))
        return Figures.of_passes(parts)

    def publish(self) -> WeightUpdate:
        """Copy the weights into shared memory as the present version; the version before it stays readable."""
        if self._shared_dir is None:
            base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self._shared_dir = Path(tempfile.mkdtemp(prefix="areal-weights-", dir=base))
            self._shared = [SharedWeights(self._shared_dir / str(i), self.flat.numel(), create=True) for i in range(2)]
        slot = self._shared[self.version % 2]
        slot.flat.copy_(self.flat)
        return WeightUpdate(self.version, digest(slot.flat), str(slot.path))

    def save(self, directory: str) -> None:
        """Write the model in Hugging Face's format (the tokenizer is the caller's)."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        self.model.save(target)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beyond the model itself."""
        return {"version": self.version, "steps": self._steps, "optimizer": self._optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.version = state["version"]
        self._steps = state["steps"]
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Remove the shared weights; processes that mapped them keep their view."""
        if self._shared_dir is not None:
            shutil.rmtree(self._shared_dir, ignore_errors=True)
            self._shared_dir = None

    @property
    def decoder(self) -> Decoder:
        """The package's own decoder, where it is what learns."""
        assert isinstance(self.model, PackedDecoder), "this model is computed by transformers"
        return self.model.decoder

    def _passes(self, batch: TokenBatch) -> Iterable[Pass]:
        return self.model.passes(batch.spans, self.max_tokens_per_mb)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self._config
        matrices, slices = self.model.matrices, []
        for span, decay in ((slice(0, matrices), config.weight_decay), (slice(matrices, None), 0.0)):
            leaf = self.flat[span].requires_grad_()
            leaf.grad = self.flat_grad[span]
            slices.append({"params": [leaf], "weight_decay": decay})
        return torch.optim.AdamW(slices, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)

    def _step(self) -> float:
        norm = float(self.flat_grad.norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; the weights were left as they were")
        limit = self._config.gradient_clipping
        if 0 < limit < norm:
            self.flat_grad.mul_(limit / norm)
        rate = learning_rate(self._config, self._steps, self.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._steps += 1
        return norm


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Linear warm-up, then constant or a cosine that falls to a tenth."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.lr_scheduler == "constant":
        return config.lr * warm
    done = min(1.0, step / max(1, total_steps))
    return config.lr * warm * (0.55 + 0.45 * math.cos(math.pi * done))
