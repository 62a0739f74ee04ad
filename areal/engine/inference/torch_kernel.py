"""Computes an engine's steps with torch: on any device, and the reference for the native kernel."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.inference.attention import SharedPrefix, lay_out
from areal.engine.inference.kv_cache import KeyValueCache
from areal.engine.inference.model_runner import Piece
from areal.engine.inference.sampler import sample
from areal.engine.model.decoder import Decoder
from areal.engine.model.device import memory_bytes

ONE_THREAD_FLOPS = 1e8
"""Steps smaller than this lose more by waking other threads than these can save."""
MEMORY_THREADS = 2
"""Up to this many threads read memory no faster than one, and a single token costs little but reading the weights."""


class TorchKernel:
    """Implements `StepKernel`."""

    name = "torch"
    reads_neighbours = True
    sample = staticmethod(sample)

    def __init__(self, decoder: Decoder, dtype: torch.dtype = torch.float32) -> None:
        self._decoder = decoder
        self._on_cpu = decoder.flat.is_cpu
        self._computing = (
            decoder if dtype == decoder.flat.dtype else Decoder(decoder.architecture, decoder.flat.to(dtype))
        )
        self.cache_dtype = dtype
        self.matrices = Matrices(_matrices(self._computing))
        self.fits_twice = self.matrices.fit_twice

    def refresh(self) -> None:
        if self._computing is not self._decoder:
            self._computing.flat.copy_(self._decoder.flat)
        self.matrices.refresh()

    def prepare(self, decoder: Decoder) -> "Layouts":
        new = decoder
        if decoder.flat.dtype != self.cache_dtype:
            new = Decoder(decoder.architecture, decoder.flat.to(self.cache_dtype))
        return Layouts.of(_matrices(self._computing), _matrices(new))

    def adopt(self, prepared: object) -> None:
        assert isinstance(prepared, Layouts)
        if self._computing is not self._decoder:
            self._computing.flat.copy_(self._decoder.flat)
        self.matrices.layouts = prepared

    def logits(
        self,
        cache: KeyValueCache,
        ids: Tensor,
        positions: Tensor,
        pieces: Sequence[Piece],
        shared: Sequence[SharedPrefix],
    ) -> Tensor:
        layout = lay_out(cache, ids, positions, (positions + 1).tolist(), pieces, shared)
        linear = self.matrices.linear
        with self._threads(layout.ids.shape[0]):
            hidden = self._computing.hidden(layout.ids, layout.positions, layout.attend, linear)
            wanted = hidden if layout.wanted is None else hidden[layout.wanted]
            return self._computing.logits(wanted, linear).float()

    @contextmanager
    def _threads(self, tokens: int) -> Iterator[None]:
        """On a CPU, one thread for a small step, all of them for another."""
        if not self._on_cpu:
            yield
            return
        before = torch.get_num_threads()
        small = 2 * tokens * self._decoder.flat.numel() < ONE_THREAD_FLOPS
        reads = tokens == 1 and before <= MEMORY_THREADS
        if before == 1 or not (small or reads):
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


SMALLEST_BYTES = 32 << 20
"""Smaller matrices stay in the processor's cache, where a plain product costs less to call."""
COPIES_MEMORY_SHARE = 0.2
"""Of the machine's memory, for copies of the matrices."""
BLOCKED_TOKENS = range(2, 48)
"""Where oneDNN's layout is ahead of the transposed one."""
BLOCKED_FOR = 32
"""Tokens that oneDNN's layout is chosen for; layouts for 8 and 128 were equally fast."""


@dataclass(frozen=True)
class Layouts:
    """Copies of matrices, by the id of the weight that each is used for."""

    transposed: dict[int, Tensor]
    blocked: dict[int, Tensor]

    @classmethod
    def of(cls, weights: Sequence[Tensor], values: Sequence[Tensor]) -> "Layouts":
        """`values` are those of the weights, now or after a swap."""
        pairs = list(zip(map(id, weights), values, strict=True))
        return cls(
            {key: value.t().contiguous() for key, value in pairs}, {key: _reordered(value) for key, value in pairs}
        )


class Matrices:
    """Multiplies by any of `weights`, in the layouts that are fastest on this processor; `refresh` reads them again.

    On other devices than a CPU that is the plain one.

    Measured on one core at 135M parameters against `F.linear`: a transposed copy is read 1.5 times as fast for a single
    token and gains 8 % on long prompts; oneDNN's blocked layout gains 1.2 to 1.7 times between 2 and 16 tokens and is
    as good up to 32. Models whose matrices stay in the processor's cache gain nothing and get no copies, nor do those
    whose copies would take too much memory.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        room = COPIES_MEMORY_SHARE * memory_bytes(weights[0].device)
        fits = size >= SMALLEST_BYTES and 2 * size <= room
        self.weights = list(weights) if fits and _has_layouts(weights[0]) else []
        self.fit_twice = bool(self.weights) and 5 * size <= room
        """Whether there is room for the weights and layouts of a version that waits for its swap."""
        self.layouts = Layouts({}, {})

    def refresh(self) -> None:
        if not self.layouts.transposed:
            self.layouts = Layouts.of(self.weights, self.weights)
            return
        for weight in self.weights:
            self.layouts.transposed[id(weight)].copy_(weight.t())
            self.layouts.blocked[id(weight)] = _reordered(weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.weights:
            return F.linear(x, weight, bias)
        if x.shape[0] in BLOCKED_TOKENS:
            blocked = self.layouts.blocked[id(weight)]
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "none", [], "")
            return product
        transposed = self.layouts.transposed[id(weight)]
        return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)


def _matrices(decoder: Decoder) -> list[Tensor]:
    return [parameter for parameter in decoder.parameters.values() if parameter.dim() > 1]


def _reordered(weight: Tensor) -> Tensor:
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BLOCKED_FOR)
    return blocked


def _has_layouts(weight: Tensor) -> bool:
    if not (weight.is_cpu and torch.backends.mkldnn.is_available()):
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
