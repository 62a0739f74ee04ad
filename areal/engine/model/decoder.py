"""The one decoder of this package: Llama, Qwen2 and Qwen3 in plain torch, used by the engine and by the trainer.

Tokens are a flat dimension T without padding. Attention between them is up to the caller: `attend` receives each
layer's queries, keys and values, so the trainer passes packed sequences and the engine its key-value cache, and both
compute the same numbers. All parameters are views of one flat buffer, so weights are copied, hashed and stepped whole.

Shapes: T tokens, D hidden, H heads, K key-value heads, E head dimension, V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal.engine.model.architecture import Architecture, rotary_frequencies

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q[T,H,E], k[T,K,E], v[T,K,E]) -> [T,H,E]"""
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x[T,in], weight[out,in], bias[out] or None) -> [T,out]"""

Rotation = tuple[Tensor, ...]
"""Cosines and sines [T,1,E]."""


class Layer:
    """Parameters of one block, as views of the decoder's flat buffer."""

    def __init__(self, take: Callable[[str], Tensor | None], index: int) -> None:
        def need(name: str) -> Tensor:
            tensor = take(f"layers.{index}.{name}")
            assert tensor is not None, name
            return tensor

        self.attention_norm = need("attention_norm")
        self.qkv = need("qkv")
        self.qkv_bias = take(f"layers.{index}.qkv_bias")
        self.q_norm = take(f"layers.{index}.q_norm")
        self.k_norm = take(f"layers.{index}.k_norm")
        self.output = need("output")
        self.output_bias = take(f"layers.{index}.output_bias")
        self.mlp_norm = need("mlp_norm")
        self.gate_up = need("gate_up")
        self.down = need("down")
        self._head_norms: tuple[int, Tensor] | None = None

    def head_norms(self, heads: int, kv_heads: int) -> Tensor:
        """The norms of queries and keys as one [H+K,E]; without gradients it is kept until they change."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        version = self.q_norm._version
        if self._head_norms is None or self._head_norms[0] != version or torch.is_grad_enabled():
            joint = torch.cat((self.q_norm.expand(heads, -1), self.k_norm.expand(kv_heads, -1)))
            if torch.is_grad_enabled():
                return joint
            self._head_norms = (version, joint)
        return self._head_norms[1]


class Decoder:
    """A causal language model on one flat buffer; the buffer's device and dtype are those it computes in.

    With a value head it is a critic and has no logits.
    """

    def __init__(self, architecture: Architecture, flat: Tensor | None = None, flat_grad: Tensor | None = None) -> None:
        """The parameters are views of `flat` (None = float32 zeros on the CPU).

        With `flat_grad` they are leaves whose gradients accumulate there.
        """
        self.architecture = architecture
        shapes = parameter_shapes(architecture)
        size = parameter_count(architecture)
        self.flat = torch.zeros(size) if flat is None else flat
        assert self.flat.numel() == size, (self.flat.numel(), size)
        self.parameters: dict[str, Tensor] = {}
        for name, view, span in _spans(self.flat, shapes):
            if flat_grad is not None:
                view.requires_grad_()
                view.grad = flat_grad[span].view(shapes[name])
            self.parameters[name] = view
        self.embedding = self.parameters["embedding"]
        self.head = self.parameters.get("head", self.embedding)
        self.final_norm = self.parameters["final_norm"]
        self.layers = [Layer(self.parameters.get, i) for i in range(architecture.num_layers)]
        self.rotary = _rotary_table(architecture).to(self.flat)
        """[positions,2E]: cosines, then signed sines."""
        self._on_cpu = self.flat.is_cpu
        self._zero = self.flat.new_zeros(())
        sizes, eps = (architecture.hidden_size, architecture.head_dim), architecture.norm_eps
        self._floors = {size: self.flat.new_full((), (size * eps) ** 0.5) for size in sizes}

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        linear: Linear = F.linear,
        *,
        only: Tensor | None = None,
        checkpointing: bool = False,
    ) -> Tensor:
        """Final hidden states [T,D] of `ids[T]` at `positions[T]`; `linear` multiplies by the matrices.

        `only`: of these tokens; the last layer gives the others no more than their keys and values. `checkpointing`
        computes each layer again for its gradient instead of keeping its activations.
        """
        rotation = self.rotary.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        h = F.embedding(ids, self.embedding)
        for index in range(len(self.layers)):
            wanted = only if index == len(self.layers) - 1 else None
            if checkpointing:
                h = checkpoint(
                    self._layer,
                    index,
                    h,
                    rotation,
                    attend,
                    linear,
                    wanted,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                h = self._layer(index, h, rotation, attend, linear, wanted)
        return self._norm(h, self.final_norm)

    def logits(self, hidden: Tensor, linear: Linear = F.linear) -> Tensor:
        """[..., D] -> [..., V]"""
        return linear(hidden, self.head, None)

    def values(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [...], in float32 whatever `hidden` was computed in"""
        return (hidden.float() * self.parameters["value_head"][0]).sum(-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        size = x.shape[-1]
        if torch.is_grad_enabled() or not self._on_cpu:
            return F.rms_norm(x, (size,), None, self.architecture.norm_eps) * weight
        # The same in what are fewer kernels on a CPU: x sqrt(D) / sqrt(|x|^2 + D eps).
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floors[size])
        return torch.addcdiv(self._zero, x, length, value=size**0.5).mul_(weight)

    def _layer(
        self, index: int, h: Tensor, rotation: Rotation, attend: Attend, linear: Linear, only: Tensor | None
    ) -> Tensor:
        layer = self.layers[index]
        mixed = self._attention(layer, index, h, rotation, attend, linear)
        if only is not None:
            h, mixed = h.index_select(0, only), mixed.index_select(0, only)
        h = h + linear(mixed, layer.output, layer.output_bias)
        return h + self._mlp(layer, h, linear)

    def _attention(
        self, layer: Layer, index: int, h: Tensor, rotation: Rotation, attend: Attend, linear: Linear
    ) -> Tensor:
        """[T,D] -> [T,H·E], before the output's matrix."""
        a = self.architecture
        qkv = linear(self._norm(h, layer.attention_norm), layer.qkv, layer.qkv_bias)
        by_head = qkv.view(-1, a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        qk, v = torch.split_with_sizes(by_head, (a.num_heads + a.num_kv_heads, a.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = self._norm(qk, layer.head_norms(a.num_heads, a.num_kv_heads))
        q, k = torch.split_with_sizes(_rotate(qk, *rotation), (a.num_heads, a.num_kv_heads), dim=1)
        return attend(index, q, k, v).reshape(h.shape[0], -1)

    def _mlp(self, layer: Layer, h: Tensor, linear: Linear) -> Tensor:
        gate, up = linear(self._norm(h, layer.mlp_norm), layer.gate_up, None).chunk(2, dim=-1)
        return linear(F.silu(gate).mul_(up), layer.down, None)


def parameter_shapes(a: Architecture) -> dict[str, torch.Size]:
    """Names and shapes in the order of the flat buffer: matrices first, so that weight decay is one slice."""
    d, e, ff = a.hidden_size, a.head_dim, a.intermediate_size
    qkv_rows = (a.num_heads + 2 * a.num_kv_heads) * e
    matrices = {"embedding": (a.vocab_size, d)}
    vectors = {"final_norm": (d,)}
    if a.value_head:
        matrices["value_head"] = (1, d)
    elif not a.tied_embeddings:
        matrices["head"] = (a.vocab_size, d)
    for i in range(a.num_layers):
        prefix = f"layers.{i}."
        matrices |= {
            prefix + "qkv": (qkv_rows, d),
            prefix + "output": (d, a.num_heads * e),
            prefix + "gate_up": (2 * ff, d),
            prefix + "down": (d, ff),
        }
        vectors |= {prefix + "attention_norm": (d,), prefix + "mlp_norm": (d,)}
        if a.qkv_bias:
            vectors[prefix + "qkv_bias"] = (qkv_rows,)
        if a.output_bias:
            vectors[prefix + "output_bias"] = (d,)
        if a.qk_norm:
            vectors |= {prefix + "q_norm": (e,), prefix + "k_norm": (e,)}
    return {name: torch.Size(shape) for name, shape in {**matrices, **vectors}.items()}


def parameter_views(architecture: Architecture, flat: Tensor) -> dict[str, Tensor]:
    """A buffer of as many values as there are parameters, by their names."""
    return {name: view for name, view, _ in _spans(flat, parameter_shapes(architecture))}


def parameter_count(architecture: Architecture) -> int:
    return sum(shape.numel() for shape in parameter_shapes(architecture).values())


def initialise(decoder: Decoder, generator: torch.Generator) -> None:
    """Random weights: normal with deviation 0.02, smaller where a residual branch ends; norms 1, biases 0."""
    depth_scale = (2 * decoder.architecture.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in decoder.parameters.items():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                deviation = 0.02 * (depth_scale if name.endswith(("output", "down")) else 1.0)
                parameter.normal_(0.0, deviation, generator=generator)


def _spans(flat: Tensor, shapes: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor, slice]]:
    start = 0
    for name, shape in shapes.items():
        span = slice(start, start + shape.numel())
        yield name, flat[span].view(shape), span
        start = span.stop


def _rotary_table(architecture: Architecture) -> Tensor:
    """Per position, the cosines and the sines; the first half of the sines is negative, as `_rotate` needs it."""
    frequencies = torch.tensor(rotary_frequencies(architecture), dtype=torch.float32)
    angles = torch.arange(architecture.max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos, -sin, sin), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
