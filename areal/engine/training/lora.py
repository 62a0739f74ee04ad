"""A model of which only an adapter is trained: `AdaptedModel` is a `TrainableModel` whose parameters are A and B.

The model itself is frozen and is never written to. So gradients, the optimizer, checkpoints and what is published have
the adapter's size, and the model without it, which a KL penalty may compare with, is a pass away (`WithoutAdapter`).
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from areal.api.errors import ModelError
from areal.config.training import LoraConfig
from areal.engine.model.adapter import (
    AdapterConfig,
    LowRank,
    adapter_writer,
    base_digest,
    open_adapter,
    require_targets,
    save_adapter,
    tensor_names,
)
from areal.engine.model.low_rank import Switch
from areal.engine.model.published import NamedTensors, WeightWriter
from areal.engine.training.engine import Pass, ScoringEngine, TokenBatch, TrainableModel
from areal.engine.training.head import Temperatures
from areal.engine.training.packing import Span
from areal.engine.training.token_sets import DrawnFrom


class Adaptable(TrainableModel, Protocol):
    """A model whose linear layers may be given matrices of an adapter."""

    @property
    def head_layer(self) -> str:
        """The name of the layer that gives logits."""
        ...

    def linear_weights(self) -> NamedTensors:
        """The matrix [out, in] of every linear layer, a tied head not among them."""
        ...

    def adapt(self, layers: Mapping[str, LowRank], scale: float) -> Switch:
        """From now on compute these layers with their matrices, unless the switch is off."""
        ...


class AdapterParameters:
    """A and B of every layer of an adapter, in one float32 buffer."""

    def __init__(self, config: AdapterConfig, linear: NamedTensors, device: torch.device) -> None:
        """They are zeros. `linear`: the weights of the model's linear layers, of which only the shapes matter."""
        self.config = config
        self._linear = [(name, torch.empty(weight.shape, device="meta")) for name, weight in linear]
        """Of the whole model."""
        shapes: list[tuple[str, tuple[int, int]]] = []
        for name, weight in self._linear:
            layer, (rows, columns) = name.removesuffix(".weight"), weight.shape
            if config.targets(layer):
                shapes += [(layer, (config.r, columns)), (layer, (rows, config.r))]
        self._shapes = shapes
        size = sum(math.prod(shape) for _, shape in shapes)
        self.flat = torch.zeros(size, device=device)
        self.flat_grad = torch.zeros(size, device=device)
        self.layers = self._by_layer(self.flat)
        grads = self._by_layer(self.flat_grad)
        for layer, matrices in self.layers.items():
            for matrix, grad in zip(matrices, grads[layer], strict=True):
                matrix.requires_grad_()
                matrix.grad = grad

    def initialise(self, seed: int) -> None:
        """A as PEFT draws it, by the seed and the layer's name, and B = 0: the adapter changes nothing yet."""
        with torch.no_grad():
            for layer, (a, b) in self.layers.items():
                digest = hashlib.sha256(f"{seed} {layer}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
                bound = a.shape[1] ** -0.5
                a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
                b.zero_()

    def named_views(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """A buffer that is laid out as `flat` is, by PEFT's names."""
        return tensor_names(self._by_layer(flat))

    def load(self, directory: Path, digest: str) -> None:
        """Take the matrices of an adapter. Raises ModelError unless it has these settings and belongs to the model of
        this digest, as far as its files tell."""
        saved = open_adapter(directory)
        its = saved.layers(self._linear)
        known, found = _settings(self.config, self.layers), _settings(saved.config, its)
        if known != found or its.keys() != self.layers.keys():
            raise ModelError(
                f"the adapter in {str(directory)!r} must have the settings of actor.lora, {known}, got {found}; set "
                "actor.lora to these"
            )
        saved.require_base(digest)
        with torch.no_grad():
            for layer, matrices in its.items():
                for own, new in zip(self.layers[layer], matrices, strict=True):
                    own.copy_(new)

    def _by_layer(self, flat: Tensor) -> dict[str, LowRank]:
        parts = flat.split([math.prod(shape) for _, shape in self._shapes])
        views = [part.view(shape) for part, (_, shape) in zip(parts, self._shapes, strict=True)]
        return {layer: (a, b) for (layer, _), a, b in zip(self._shapes[::2], views[::2], views[1::2], strict=True)}


def _settings(config: AdapterConfig, layers: Mapping[str, LowRank]) -> str:
    ends = sorted({layer.rpartition(".")[2] for layer in layers})
    return f"rank {config.r}, alpha {config.lora_alpha:g} and targets {', '.join(ends)} ({len(layers)} layers)"


def adapter_config(lora: LoraConfig, layers: Sequence[str], head: str) -> AdapterConfig:
    """The adapter that a config asks for, to a model with linear layers of these names. Raises ModelError."""
    assert lora.rank is not None, "there is an adapter"
    usual = sorted({layer.rpartition(".")[2] for layer in layers if layer != head})
    if not usual:
        raise ModelError("an adapter changes linear layers, and this model has none; leave actor.lora out")
    require_targets("actor.lora", lora.targets, layers)
    return AdapterConfig(lora.rank, lora.scaled_alpha, tuple(lora.targets or usual))


def open_parameters(
    lora: LoraConfig, linear: Sequence[tuple[str, Tensor]], head: str, *, seed: int, device: torch.device
) -> AdapterParameters:
    """Those that a run begins with, unless they are to be loaded."""
    config = adapter_config(lora, [name.removesuffix(".weight") for name, _ in linear], head)
    parameters = AdapterParameters(config, linear, device)
    parameters.initialise(seed)
    return parameters


class AdaptedModel:
    """Implements `TrainableModel`."""

    def __init__(self, base: Adaptable, lora: LoraConfig, *, seed: int, base_name: str) -> None:
        """`base` is frozen; `base_name` is what the adapter's files call it."""
        assert base.flat_grad is None, "the model itself is not trained"
        self.base = base
        self._base_name = base_name
        self._digest: str | None = None
        linear = list(base.linear_weights())
        self.parameters = open_parameters(lora, linear, base.head_layer, seed=seed, device=base.flat.device)
        if lora.path:
            self.load(Path(lora.path).expanduser())
        self._switch = base.adapt(self.parameters.layers, self.parameters.config.scale)
        self.flat = self.parameters.flat
        self.flat_grad: Tensor | None = self.parameters.flat_grad
        self.matrices = len(self.flat)

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterable[Any]:
        return self.base.passes(spans, max_tokens)

    def scores(
        self,
        part: Any,
        temperatures: Temperatures,
        drawn: DrawnFrom | None = None,
        entropies: Tensor | None = None,
    ) -> Tensor:
        return self.base.scores(part, temperatures, drawn, entropies)

    def base_scores(self, part: Any, temperatures: Temperatures, drawn: DrawnFrom | None = None) -> Tensor:
        """Those of the model without the adapter; not differentiable."""
        with self._switch.off(), torch.no_grad():
            return self.base.scores(part, temperatures, drawn)

    def named_weights(self) -> NamedTensors:
        """The adapter's matrices, by PEFT's names."""
        return self.named_views(self.flat)

    def named_views(self, flat: Tensor) -> NamedTensors:
        return self.parameters.named_views(flat)

    def writer(self, directory: Path, dtype: torch.dtype) -> WeightWriter:
        """Publishes the adapter alone, in float32 whatever engines compute in: it is small."""
        return adapter_writer(directory, self.parameters.config, self.parameters.layers, self.digest)

    def load(self, directory: Path) -> None:
        """Take the adapter of a directory."""
        self.parameters.load(directory, self.digest)

    def save(self, directory: Path) -> None:
        """Write the adapter as PEFT does."""
        config, layers = self.parameters.config, self.parameters.layers
        save_adapter(directory, config, layers, base=self._base_name, digest=self.digest)

    @property
    def digest(self) -> str:
        """Of the model that the adapter belongs to, which never changes."""
        if self._digest is None:
            self._digest = base_digest(self.base.named_weights())
        return self._digest


class WithoutAdapter(ScoringEngine):
    """Log-probs of an adapted model as it was before, in the same memory."""

    model: AdaptedModel

    def _scores(self, part: Pass, batch: TokenBatch, entropies: Tensor | None = None) -> Tensor:
        assert entropies is None, "they are asked of what is trained"
        with self._arithmetic():
            return self.model.base_scores(part, batch.temperatures_at(part.order), batch.drawn_at(part.order))
