"""Train a model: forward and backward passes, AdamW on the flat buffer, checkpoints, published versions.

A batch is flat: the N positions whose tokens are trained, and every per-token figure as a tensor [N]. The loss sums
over positions with weights that the caller chose for the whole batch, so how the batch is cut into passes does not
change the gradient. A `TrainableModel` gives one number for each of these positions: its token's log-probability, or
if the model is a critic, the value before that token. How a pass computes them is up to it.

Callers see host tensors only. A batch is sent to the model's device once, and nothing waits for that device until all
passes of the batch are under way; then the figures and the gradient's norm come back.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from areal.api.engine_api import WeightUpdate
from areal.api.errors import NonFiniteUpdate
from areal.config.training import OptimizerConfig
from areal.engine.model.architecture import Architecture
from areal.engine.model.decoder import Decoder
from areal.engine.model.device import to_device, to_host
from areal.engine.model.published import NamedTensors, WeightWriter, shared_memory
from areal.engine.training.adamw import AdamW
from areal.engine.training.figures import Figures
from areal.engine.training.head import Temperatures
from areal.engine.training.moments import KINDS, Moments, load_moments, save_moments
from areal.engine.training.packing import PackedDecoder, Span
from areal.engine.training.token_sets import FIELD, DrawnFrom, TokenSets

Loss = Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, Figures]]
"""(scores [n], per-token fields [n]) -> (summed weighted loss, figures)"""

SUMMED_VALUES = 1 << 22
"""So many are held in double precision at a time."""
SUMMED_IN_CACHE = 1 << 18
"""The same on a CPU, whose cache holds these: from memory it takes twenty times as long."""


@dataclass
class TokenBatch:
    """Sequences with the positions to train, and per-token fields [N] in the order of those positions."""

    spans: Sequence[Span]
    temperatures: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)
    temperature: float | None = None
    """Of all tokens, where `on` has found that they have the same."""
    sets: TokenSets | None = None
    """What tokens were drawn from; the field `sets` says which of these a token was. None = all were drawn from the
    whole vocabulary."""

    def on(self, device: torch.device) -> "TokenBatch":
        """The same with its tensors on a device."""
        fields = {name: to_device(values, device) for name, values in self.fields.items()}
        found = torch.unique_consecutive(self.temperatures).tolist()
        return TokenBatch(
            self.spans,
            to_device(self.temperatures, device),
            fields,
            found[0] if len(found) == 1 else None,
            None if self.sets is None else self.sets.on(device),
        )

    def temperatures_at(self, order: Tensor) -> Temperatures:
        """Of some tokens, once it is known whether all have the same."""
        return self.temperatures[order] if self.temperature is None else self.temperature

    def drawn_at(self, order: Tensor) -> DrawnFrom | None:
        """What some tokens were drawn from."""
        return None if self.sets is None else DrawnFrom(self.sets, self.fields[FIELD][order])


class Pass(Protocol):
    """Sequences, or parts of them, that one forward pass computes."""

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
        """Every parameter, in one float32 buffer on the device that computes the model."""
        ...

    @property
    def flat_grad(self) -> Tensor | None:
        """The buffer in which gradients accumulate; None = the model is frozen."""
        ...

    @property
    def matrices(self) -> int:
        """How many leading values of the buffer belong to matrices; weight decay applies to these only."""
        ...

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterable[Any]:
        """Cut spans into passes of at most `max_tokens` tokens; a single longer sequence gets a pass of its own."""
        ...

    def scores(
        self,
        part: Any,
        temperatures: Temperatures,
        drawn: DrawnFrom | None = None,
        entropies: Tensor | None = None,
    ) -> Tensor:
        """One number for each asked token of a pass, in its order; differentiable.

        Its log-probability among the tokens that it was drawn from, or of a critic, the value before it, which neither
        they nor a temperature change. `entropies`, one for each too, takes those of what a policy drew from.
        """
        ...

    def named_weights(self) -> NamedTensors:
        """Every parameter once, by its Hugging Face name."""
        ...

    def named_views(self, flat: Tensor) -> NamedTensors:
        """A buffer that is laid out as `flat` is, parameter by parameter."""
        ...

    def writer(self, directory: Path, dtype: torch.dtype) -> WeightWriter:
        """What publishes it, for engines that compute in `dtype`."""
        ...

    def load(self, directory: Path) -> None:
        """Take the weights of a Hugging Face directory of the same architecture."""
        ...

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face's format (the tokenizer is the caller's)."""
        ...


class ScoringEngine:
    """Computes scores. A frozen model, which the reference is, takes the memory of its weights only."""

    def __init__(self, model: TrainableModel, *, max_tokens_per_mb: int = 16384, dtype: str = "float32") -> None:
        """With `dtype` bfloat16 matrix products and attention are computed in it."""
        self.model = model
        self.flat = model.flat
        self.device = self.flat.device
        self.max_tokens_per_mb = max_tokens_per_mb
        self._dtype = dtype

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probability of every trained token [N] under the present weights, on the host."""
        return self._scored(batch)

    def values(self, batch: TokenBatch) -> Tensor:
        """What a critic expects before every trained token [N], on the host."""
        return self._scored(batch)

    def _scored(self, batch: TokenBatch) -> Tensor:
        batch = batch.on(self.device)
        out = self.flat.new_empty(len(batch.temperatures))
        with torch.no_grad():
            for part in self._passes(batch):
                out[part.order] = self._scores(part, batch)
        return to_host(out)[0]

    def _passes(self, batch: TokenBatch) -> Iterable[Pass]:
        return self.model.passes(batch.spans, self.max_tokens_per_mb)

    def _scores(self, part: Pass, batch: TokenBatch, entropies: Tensor | None = None) -> Tensor:
        with self._arithmetic():
            return self.model.scores(part, batch.temperatures_at(part.order), batch.drawn_at(part.order), entropies)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        if self._dtype == "float32":
            return nullcontext()
        autocast: AbstractContextManager[Any] = torch.autocast(self.device.type, dtype=getattr(torch, self._dtype))
        return autocast


class TrainingEngine(ScoringEngine):
    """Implements `TrainEngine`: a model, its optimizer, and the versions that it publishes."""

    def __init__(
        self,
        model: TrainableModel | Architecture,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        max_tokens_per_mb: int = 16384,
        directory: Path | None = None,
        dtype: str = "float32",
    ) -> None:
        """The package's decoder computes a plain architecture; its weights are zeros unless read from `directory`.

        With `dtype` bfloat16 matrix products and attention are computed in it; weights, gradients, norms, log-probs and
        the optimizer stay float32.
        """
        opened: TrainableModel = PackedDecoder(model) if isinstance(model, Architecture) else model
        super().__init__(opened, max_tokens_per_mb=max_tokens_per_mb, dtype=dtype)
        self.version = 0
        self.total_steps = total_steps
        self._config = optimizer
        assert opened.flat_grad is not None, "a frozen model cannot be trained"
        self.flat_grad = opened.flat_grad
        if directory is not None:
            self.model.load(directory)
        self._optimizer = self._make_optimizer()
        self._steps = 0
        self._writer: WeightWriter | None = None
        self.shared_dir: Path | None = None
        """Where the weights are published; None = a directory of its own, made by the first `publish`."""

    def train_batch(
        self,
        batch: TokenBatch,
        loss: Loss,
        place: int | None = None,
        *,
        scores: Tensor | None = None,
        entropies: Tensor | None = None,
    ) -> Figures:
        """One optimizer step, or none for an empty batch; returns the loss's figures and the step's own.

        `place` is the step's place in the learning-rate schedule, from 0; None = the one after the last, empty batches
        counted. `scores` [N], on the host, takes those of the forward passes, which are of the weights before the step,
        and `entropies` [N], of a policy, those of what its tokens were drawn from.
        Raises NonFiniteUpdate, with weights, optimizer and these as they were, if loss or gradient are not finite.
        """
        self._steps = self._steps if place is None else place
        rate = learning_rate(self._config, self._steps, self.total_steps)
        parts = [Figures(mean={"loss": 0.0, "lr": rate}, total={"forward_tokens": 0})]
        self.flat_grad.zero_()
        batch = batch.on(self.device)
        found, spread = self.flat.new_empty((2, len(batch.temperatures)))
        for part in self._passes(batch) if batch.spans else ():
            fields = {name: values[part.order] for name, values in batch.fields.items()}
            own = None if entropies is None else spread.new_empty(len(part.order))
            computed = self._scores(part, batch, own)
            value, figures = loss(computed, fields)
            value.backward()
            found[part.order] = computed.detach()
            if own is not None:
                spread[part.order] = own
            parts += [figures, Figures(mean={"loss": value.detach()}, total={"forward_tokens": part.tokens})]
        whole = Figures.of_passes(parts)
        norm = math.sqrt(sum_of_squares(self.flat_grad))
        if not (math.isfinite(whole["loss"]) and math.isfinite(norm)):
            raise NonFiniteUpdate(
                f"the loss and the gradient norm must be finite, got {whole['loss']} and {norm}; "
                "the weights were not changed"
            )
        if batch.spans:
            self._step(rate, norm)
        if scores is not None:
            scores.copy_(to_host(found)[0])
        if entropies is not None:
            entropies.copy_(to_host(spread)[0])
        self._steps += 1
        return Figures.of_passes([whole, Figures(mean={"grad_norm": norm})])

    def publish(self, dtype: str = "float32") -> WeightUpdate:
        """Copy the weights into shared memory as the present version, in `dtype`; the previous one stays readable."""
        if self._writer is None:
            self.shared_dir = self.shared_dir or Path(tempfile.mkdtemp(prefix="areal-", dir=shared_memory()))
            self._writer = self.model.writer(self.shared_dir, getattr(torch, dtype))
        return self._writer.write(self.version)

    def save(self, directory: str) -> None:
        """Write the model in Hugging Face's format (the tokenizer is the caller's)."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        self.model.save(target)

    def begin_checkpoint(self, directory: Path) -> None:
        """Write the model and the optimizer's moments: a run may go on with another device, or on ranks."""
        self.save(str(directory))
        save_moments(directory, self.moments())

    def load_checkpoint(self, directory: Path, state: dict[str, Any]) -> None:
        """Take the model and the optimizer of a checkpoint, whether one process or ranks have written it."""
        self.model.load(directory)
        self.version, self._steps = state["version"], state["steps"]
        if "optimizer" in state:  # from before moments had names
            self._optimizer.load_state_dict(state["optimizer"])
            return
        self._set_moments(load_moments(directory, self.moments()))

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "steps": self._steps}

    def moments(self) -> Moments:
        """A copy of what the optimizer knows beside the weights, on the host."""
        steps, buffers = 0, {kind: torch.zeros(self.flat.shape) for kind in KINDS}
        for span, leaf in self._optimized():
            if known := self._optimizer.state.get(leaf):  # there is none before the first step
                steps = int(known["step"])
                for kind, buffer in buffers.items():
                    buffer[span] = to_host(known[kind])[0]
        return Moments(steps, {kind: dict(self.model.named_views(buffer)) for kind, buffer in buffers.items()})

    def _set_moments(self, moments: Moments) -> None:
        whole = {}
        for kind, named in moments.named.items():
            whole[kind] = torch.empty(self.flat.shape)
            for name, view in self.model.named_views(whole[kind]):
                view.copy_(named[name])
        for span, leaf in self._optimized():
            self._optimizer.state[leaf] = {
                "step": torch.tensor(float(moments.steps), device=leaf.device),
                **{kind: values[span].to(leaf.device) for kind, values in whole.items()},
            }

    def _optimized(self) -> Iterator[tuple[slice, Tensor]]:
        """The parts of the buffer that the optimizer steps, as it knows them."""
        at = 0
        for group in self._optimizer.param_groups:
            (leaf,) = group["params"]
            yield slice(at, at + leaf.numel()), leaf
            at += leaf.numel()

    def close(self) -> None:
        """Remove the shared weights; processes that mapped them keep their view."""
        if self.shared_dir is not None:
            shutil.rmtree(self.shared_dir, ignore_errors=True)
            self._writer, self.shared_dir = None, None

    @property
    def decoder(self) -> Decoder:
        """The package's own decoder, where it is the model."""
        assert isinstance(self.model, PackedDecoder), "this model is computed by transformers"
        return self.model.decoder

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self._config
        matrices, slices = self.model.matrices, []
        for span, decay in ((slice(0, matrices), config.weight_decay), (slice(matrices, None), 0.0)):
            if not len(self.flat[span]):  # an adapter has matrices only
                continue
            leaf = self.flat[span].requires_grad_()
            leaf.grad = self.flat_grad[span]
            slices.append({"params": [leaf], "weight_decay": decay})
        return AdamW(slices, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)

    def _step(self, rate: float, norm: float) -> None:
        limit = self._config.gradient_clipping
        if 0 < limit < norm:
            self.flat_grad.mul_(limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        # The fused step does not count as a change, which is how what was kept of the old weights is known to be old.
        torch.autograd.graph.increment_version(self.flat)


def sum_of_squares(values: Tensor) -> Tensor:
    """In double precision where the device has it, a piece at a time.

    On a CPU torch's norm of float32 loses values: of 300 million equal ones it finds 128 in place of 173.
    """
    kind = values.device.type
    pieces = values.detach().reshape(-1).split(SUMMED_IN_CACHE if kind == "cpu" else SUMMED_VALUES)
    exact = (piece.to(torch.float32 if kind == "mps" else torch.float64) for piece in pieces)
    return torch.stack([torch.dot(piece, piece) for piece in exact]).sum()


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Linear warm-up, then constant or a cosine that falls to a tenth."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.lr_scheduler == "constant":
        return config.lr * warm
    done = min(1.0, step / max(1, total_steps))
    return config.lr * warm * (0.55 + 0.45 * math.cos(math.pi * done))
