"""Computes an engine's steps and draws its tokens with step.cpp, on weights that it keeps packed.

It owns the packed weights and the memory of a step. It reads the cache's own tensors where they are, and the decoder's
embedding; everything else of the weights is packed again after a change (`refresh`), or was before it (`prepare`).

Logits of a token do not depend, to the bit, on what else is in its step. So tokens may be in any order: running
sequences that share a prefix are neighbours, pieces of prompts follow. Shapes: B running sequences, T tokens, V
vocabulary.
"""

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from areal.api.errors import KernelUnavailable
from areal.api.messages import Array
from areal.engine.inference.attention import SharedPrefix
from areal.engine.inference.kv_cache import KeyValueCache, KeyValuePool
from areal.engine.inference.model_runner import Piece
from areal.engine.inference.sampler import Sampled, SamplingParams, sample
from areal.engine.model.architecture import Architecture
from areal.engine.model.decoder import Decoder
from areal.engine.model.device import memory_bytes
from areal.engine.native.library import Library, load

ROWS_PARAMETERS = 1_000_000
"""Models of fewer stay in a core's own cache: each thread then computes rows of its own, all the way."""
ONE_THREAD_FLOPS = 3e6
"""Steps smaller than this are over before another thread is awake."""
ONE_THREAD_DRAW = 1 << 18
"""The same of a draw, in logits."""
PACKED_MEMORY_SHARE = 0.25
"""Of the machine's memory, for packed weights; a second set of them is made before a swap if both fit."""
HUGE_PAGE = 2 << 20
_FLOAT_BYTES = 4


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _LayerFields(ctypes.Structure):
    _fields_ = _fields(
        ctypes.c_void_p,
        "attention_norm qkv_bias q_norm k_norm output_bias mlp_norm qkv output gate_up down",
    )


class _ModelFields(ctypes.Structure):
    _fields_ = (
        *_fields(
            ctypes.c_int64,
            "layers hidden heads kv_heads head_dim intermediate vocab max_positions bfloat16",
        ),
        ("norm_eps", ctypes.c_double),
        *_fields(ctypes.c_void_p, "embedding rotary final_norm head layer"),
    )


class _StepFields(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "tokens wanted threads by_rows has_pieces"),
        *_fields(ctypes.c_void_p, "ids positions slots layer_strides head_strides groups shared wanted_tokens targets"),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("work", ctypes.c_void_p),
    )


class _DrawFields(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "rows vocab stride threads"),
        *_fields(ctypes.c_void_p, "logits temperatures greedy seeds counts tokens logprobs"),
    )


class NativeKernel:
    """Implements `StepKernel`."""

    cache_dtype = torch.float32
    reads_neighbours = False

    def __init__(self, decoder: Decoder, dtype: torch.dtype = torch.float32) -> None:
        """Weights are packed in `dtype`, float32 or bfloat16; arithmetic is in float32. Raises KernelUnavailable."""
        check_supported(decoder, dtype)
        library = load()
        self.name = library.name
        self._decoder = decoder
        self._functions = _Functions(library)
        self._dtype = dtype
        self._weights = PackedWeights(decoder.architecture, dtype, self._functions)
        self._spare: PackedWeights | None = None
        """Memory of the version before, for the next one."""
        self._vocab = decoder.architecture.vocab_size
        self._size = decoder.flat.numel()
        self.fits_twice = 2 * self._weights.size_bytes <= PACKED_MEMORY_SHARE * memory_bytes(decoder.flat.device)
        model = self._weights.model
        self._row_floats = self._functions.work(ctypes.byref(model), 1, 0)
        self._thread_floats = self._functions.work(ctypes.byref(model), 0, 1)
        self._work = torch.empty(0)
        self._rows = _Rows.none()
        self._step = _StepFields(logits_stride=self._weights.padded_vocab)
        self._step_reference = ctypes.byref(self._step)
        self._draw = _DrawFields(vocab=self._vocab)
        self._draw_reference = ctypes.byref(self._draw)
        self._tokens = np.zeros(0, dtype=np.int64)
        self._logprobs = np.zeros(0, dtype=np.float32)

    def refresh(self) -> None:
        self._weights.fill(self._decoder, torch.get_num_threads())

    def prepare(self, decoder: Decoder) -> "PackedWeights":
        weights, self._spare = self._spare, None
        weights = weights or PackedWeights(decoder.architecture, self._dtype, self._functions)
        weights.fill(decoder, threads=1)  # while steps are computed
        return weights

    def adopt(self, prepared: object) -> None:
        assert isinstance(prepared, PackedWeights)
        prepared.read_embedding_of(self._decoder)
        self._weights, self._spare = prepared, self._weights

    def logits(
        self,
        cache: KeyValueCache,
        ids: Tensor,
        positions: Tensor,
        pieces: Sequence[Piece],
        shared: Sequence[SharedPrefix],
    ) -> Tensor:
        if not self._rows.hold(cache, ids.shape[0], shared):
            self._rows = _Rows.of(cache, ids.shape[0], shared)
        tokens = self._rows.next_tokens(ids, positions)
        if pieces:
            tokens = tokens.and_pieces(cache, ids.shape[0], pieces)
        logits = torch.empty(len(tokens.targets), self._weights.padded_vocab)
        self._compute(tokens, logits)
        return logits[:, : self._vocab]

    def _compute(self, tokens: "_StepTokens", logits: Tensor) -> None:
        step, count = self._step, tokens.columns.shape[1]
        threads = torch.get_num_threads()
        if 2 * count * self._size < ONE_THREAD_FLOPS:
            threads = 1
        need = count * self._row_floats + threads * self._thread_floats
        if self._work.numel() < need:
            self._work = torch.empty(need)
        step.tokens, step.wanted = count, len(tokens.targets)
        step.threads, step.has_pieces = threads, tokens.has_pieces
        step.by_rows = self._size < ROWS_PARAMETERS and count >= threads
        begin, stride = tokens.address, 8 * count
        step.ids, step.positions, step.slots = begin, begin + stride, begin + 2 * stride
        step.layer_strides, step.head_strides = begin + 3 * stride, begin + 4 * stride
        step.groups, step.shared = begin + 5 * stride, begin + 6 * stride
        step.wanted_tokens, step.targets = tokens.wanted_address, tokens.targets_address
        step.logits, step.work = logits.data_ptr(), self._work.data_ptr()
        wrong = self._functions.step(self._weights.reference, self._step_reference)
        if wrong:
            token, position = tokens.columns[:2, wrong - 1]
            raise ValueError(
                f"tokens must lie in [0, {self._vocab}) and positions in [0, "
                f"{self._decoder.architecture.max_positions}), got token {token} at position {position}"
            )

    def sample(
        self, logits: Tensor, params: SamplingParams, counts: Sequence[int] | Array, banned: Tensor | None = None
    ) -> Sampled:
        """As `sampler.sample`, which draws for the rows with limits."""
        rows = logits.shape[0]
        if rows > len(self._tokens):
            self._tokens = np.zeros(2 * rows, dtype=np.int64)
            self._logprobs = np.zeros(2 * rows, dtype=np.float32)
            self._draw.tokens, self._draw.logprobs = _address(self._tokens), _address(self._logprobs)
        counts = np.ascontiguousarray(counts, dtype=np.uint64)
        draw = self._draw
        draw.rows, draw.stride = rows, logits.stride(0)
        draw.threads = 1 if rows * self._vocab < ONE_THREAD_DRAW else torch.get_num_threads()
        draw.logits, draw.temperatures = logits.data_ptr(), params.temperatures.data_ptr()
        draw.greedy = params.greedy.data_ptr()
        draw.seeds, draw.counts = _address(params.seeds), _address(counts)
        self._functions.draw(self._draw_reference)
        sets: dict[int, Array] = {}
        if params.limited or banned is not None:
            sets = self._sample_limited(logits, params, counts, banned)
        return Sampled(self._tokens[:rows].tolist(), self._logprobs[:rows].tolist(), sets)

    def _sample_limited(
        self, logits: Tensor, params: SamplingParams, counts: Array, banned: Tensor | None
    ) -> dict[int, Array]:
        """Draw again for the rows with limits; returns the sets of `Sampled`."""
        limited = params.limited_rows
        if banned is not None:
            limited = limited | banned.any(dim=1)
        rows = limited.nonzero().squeeze(1)
        if not len(rows):
            return {}
        which = rows.numpy()
        some = sample(logits[rows], params.of(which), counts[which], None if banned is None else banned[rows])
        self._tokens[which], self._logprobs[which] = some.tokens, some.logprobs
        return {int(which[row]): found for row, found in some.sets.items()}


def check_supported(decoder: Decoder, dtype: torch.dtype) -> None:
    """Raises KernelUnavailable for a model that the kernel cannot compute."""
    a, flat = decoder.architecture, decoder.flat
    what = ""
    if flat.device.type != "cpu":
        what = f"computes on CPUs, and this model is on {flat.device.type}"
    elif flat.dtype != torch.float32 or dtype not in (torch.float32, torch.bfloat16):
        what = f"reads float32 weights and packs them as float32 or bfloat16, got {flat.dtype} and {dtype}"
    elif a.value_head:
        what = "computes logits, and this model is a critic"
    elif a.head_dim % 2 or a.num_heads % a.num_kv_heads:
        what = f"needs even heads in whole groups, got {a.num_heads}/{a.num_kv_heads} of {a.head_dim}"
    elif packed_bytes(a, dtype) > PACKED_MEMORY_SHARE * memory_bytes(flat.device):
        what = f"would need {packed_bytes(a, dtype) >> 20} MB for packed weights, which is too much of this memory"
    if what:
        raise KernelUnavailable(f"the native kernel {what}; use rollout.kernel=torch")


class _Functions:
    """Those of the library, with their types."""

    def __init__(self, library: Library) -> None:
        handle, number, address = library.handle, ctypes.c_int64, ctypes.c_void_p
        self.step = handle.areal_step
        self.step.argtypes, self.step.restype = [address, address], number
        self.draw = handle.areal_draw
        self.draw.argtypes, self.draw.restype = [address], None
        self.work = handle.areal_work
        self.work.argtypes, self.work.restype = [address, number, number], number
        self.pack = handle.areal_pack
        self.pack.argtypes, self.pack.restype = [address, number, number, address, *[number] * 4], None
        handle.areal_panel.restype = number
        self.panel = int(handle.areal_panel())


def packed_bytes(a: Architecture, dtype: torch.dtype) -> int:
    """About what packed weights take; panels are filled up to whole ones."""
    layer = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim + 3 * a.intermediate_size
    return a.hidden_size * (a.num_layers * layer + a.vocab_size) * int(dtype.itemsize)


class PackedWeights:
    """A version's weights, as step.cpp reads them."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, functions: _Functions) -> None:
        a = self._architecture = architecture
        self._dtype, self._functions, self._panel = dtype, functions, functions.panel
        self.padded_vocab = self._padded(a.vocab_size)
        qkv = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        gate_up = 2 * self._padded(a.intermediate_size, functions.panel // 2)
        matrices = {"qkv": (qkv, a.hidden_size), "output": (a.hidden_size, a.num_heads * a.head_dim)}
        matrices |= {"gate_up": (gate_up, a.hidden_size), "down": (a.hidden_size, a.intermediate_size)}
        vectors = {"attention_norm": a.hidden_size, "mlp_norm": a.hidden_size}
        vectors |= {"qkv_bias": qkv} if a.qkv_bias else {}
        vectors |= {"output_bias": a.hidden_size} if a.output_bias else {}
        vectors |= {"q_norm": a.head_dim, "k_norm": a.head_dim} if a.qk_norm else {}
        self._matrices = {"head": self._panel_bytes(a.vocab_size, a.hidden_size)}
        self._vectors = {"final_norm": a.hidden_size}
        for i in range(a.num_layers):
            self._matrices |= {f"layers.{i}.{name}": self._panel_bytes(*shape) for name, shape in matrices.items()}
            self._vectors |= {f"layers.{i}.{name}": size for name, size in vectors.items()}
        sizes = self._matrices | {name: self._padded(size) * _FLOAT_BYTES for name, size in self._vectors.items()}
        self.size_bytes = sum(sizes.values())
        self._memory = _zeros(self.size_bytes)
        self._places: dict[str, Tensor] = {}
        at = 0
        for name, size in sizes.items():
            self._places[name] = self._memory[at : at + size]
            at += size
        self.model = self._make_model()
        self.reference = ctypes.byref(self.model)

    def fill(self, decoder: Decoder, threads: int) -> None:
        """Pack the decoder's weights."""
        for name in self._matrices:
            matrix = decoder.head if name == "head" else decoder.parameters[name]
            if name.endswith("gate_up"):
                half = self._panel // 2
                for number, part in enumerate(matrix.detach().chunk(2)):
                    self._pack(part, name, half, number * half, threads)
            else:
                self._pack(matrix.detach(), name, self._panel, 0, threads)
        for name, size in self._vectors.items():
            values = decoder.parameters[name].detach()
            self._places[name].view(torch.float32)[:size] = values.to(self._dtype)
        self.read_embedding_of(decoder)

    def read_embedding_of(self, decoder: Decoder) -> None:
        """Rows of the embedding are read in the decoder's own memory."""
        self._decoder = decoder
        self.model.embedding, self.model.rotary = decoder.embedding.data_ptr(), decoder.rotary.data_ptr()

    def _pack(self, matrix: Tensor, name: str, width: int, offset: int, threads: int) -> None:
        out, size = matrix.shape
        to, short = self._places[name].data_ptr(), self._dtype == torch.bfloat16
        self._functions.pack(matrix.data_ptr(), out, size, to, width, offset, short, threads)

    def _make_model(self) -> _ModelFields:
        a = self._architecture
        self._layers = (_LayerFields * a.num_layers)(
            *(
                _LayerFields(**{name: self._address(f"layers.{i}.{name}") for name, _ in _LayerFields._fields_})
                for i in range(a.num_layers)
            )
        )
        return _ModelFields(
            layers=a.num_layers,
            hidden=a.hidden_size,
            heads=a.num_heads,
            kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            intermediate=a.intermediate_size,
            vocab=a.vocab_size,
            max_positions=a.max_positions,
            bfloat16=self._dtype == torch.bfloat16,
            norm_eps=a.norm_eps,
            final_norm=self._address("final_norm"),
            head=self._address("head"),
            layer=ctypes.addressof(self._layers),
        )

    def _address(self, name: str) -> int | None:
        return self._places[name].data_ptr() if name in self._places else None

    def _panel_bytes(self, out: int, size: int) -> int:
        return self._padded(out) * size * int(self._dtype.itemsize)

    def _padded(self, size: int, to: int | None = None) -> int:
        to = to or self._panel
        return -(-size // to) * to


def _zeros(size: int) -> Tensor:
    """Bytes; many of them in huge pages, which a core finds sooner."""
    if size < HUGE_PAGE:
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + size]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class _StepTokens:
    """What a step computes."""

    def __init__(self, columns: Array, wanted: Array, targets: Array, *, has_pieces: bool = False) -> None:
        self.columns = columns
        """[7,T]: id, position, slot, layer stride, head stride, group, shared positions; as step.cpp's `Step`."""
        self.wanted = wanted
        """The tokens whose logits are wanted, ascending."""
        self.targets = targets
        """The row of logits that each of these gets."""
        self.has_pieces = has_pieces
        self.address, self.wanted_address, self.targets_address = map(_address, (columns, wanted, targets))

    def and_pieces(self, cache: KeyValueCache, batch: int, pieces: Sequence[Piece]) -> "_StepTokens":
        """With the pieces of prompts after the running sequences."""
        parts, ends, at = [self.columns], [], batch
        for piece in pieces:
            size = piece.end - piece.start
            if size < 1:
                raise ValueError(f"a piece of a prompt must have tokens, got those from {piece.start} to {piece.end}")
            column = np.empty((7, size), dtype=np.int64)
            column[0] = piece.ids[piece.start : piece.end]
            column[1] = np.arange(piece.start, piece.end)
            if piece.last:
                place = cache.slot_of(piece.rows[0])
                column[2:5] = np.array(_place(place.pool, place.slot))[:, None]
            else:
                column[2:5] = np.array(_place(cache.partial, 0))[:, None]
            column[5:7] = _ALONE[:, None]
            parts.append(column)
            at += size
            if piece.last:
                ends.append(at - 1)
        wanted = np.concatenate((self.wanted, np.array(ends, dtype=np.int64)))
        targets = np.concatenate((self.targets, np.arange(batch, batch + len(ends))))
        return _StepTokens(np.concatenate(parts, axis=1), wanted, targets, has_pieces=True)


_ALONE = np.array((-1, 0), dtype=np.int64)
"""Group and shared positions of a token that shares nothing."""


class _Rows:
    """Where the running sequences are and what they share; it holds until one of them moves."""

    def __init__(
        self, cache: KeyValueCache | None, batch: int, shared: Sequence[SharedPrefix], order: list[int] | None
    ) -> None:
        self._cache, self._batch, self._shared = cache, batch, shared
        self._moves = -1 if cache is None else cache.moves
        self._columns = np.empty((7, batch), dtype=np.int64)
        self._columns[5:7] = _ALONE[:, None]
        self._order = None if order is None else np.array(order, dtype=np.int64)
        wanted = np.arange(batch)
        self._tokens = _StepTokens(self._columns, wanted, wanted if self._order is None else self._order)

    @classmethod
    def none(cls) -> "_Rows":
        return cls(None, 0, (), None)

    @classmethod
    def of(cls, cache: KeyValueCache, batch: int, shared: Sequence[SharedPrefix]) -> "_Rows":
        order = None
        if shared:
            order = [row for prefix in shared for row in prefix.rows]
            order += sorted(set(range(batch)) - set(order))
        rows = cls(cache, batch, shared, order)
        places = [cache.slot_of(row) for row in order or range(batch)]
        if places:
            rows._columns[2:5] = np.array([_place(place.pool, place.slot) for place in places]).T
        at = 0
        for number, prefix in enumerate(shared):
            rows._columns[5, at : at + len(prefix.rows)] = number
            rows._columns[6, at : at + len(prefix.rows)] = prefix.length
            at += len(prefix.rows)
        return rows

    def hold(self, cache: KeyValueCache, batch: int, shared: Sequence[SharedPrefix]) -> bool:
        same = cache is self._cache and cache.moves == self._moves and batch == self._batch
        return same and (shared is self._shared or not (shared or self._shared))

    def next_tokens(self, ids: Tensor, positions: Tensor) -> _StepTokens:
        """Valid until the next call."""
        columns = self._columns
        if self._order is None:
            columns[0], columns[1] = ids.numpy(), positions.numpy()
        else:
            columns[0], columns[1] = ids.numpy()[self._order], positions.numpy()[self._order]
        return self._tokens


def _place(pool: KeyValuePool, slot: int) -> tuple[int, int, int]:
    """The address of a slot, and its strides by layer and by head."""
    return pool.address + slot * pool.slot_floats * _FLOAT_BYTES, pool.layer_floats, pool.head_floats
