"""Generate with a transformers model: prompts with images in, next-token logits out.

Where every layer attends to all earlier tokens, keys and values are kept, and a token costs one small step. Any other
architecture (sliding windows, recurrence, positions that depend on images) is computed again from all of its tokens at
each step: slower, and right. `may_cache` finds out which of the two it is.

Row i belongs to the i-th running sequence. Shapes: B sequences, L positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from areal.engine.model.device import to_device, to_host
from areal.engine.model.published import NamedTensors
from areal.engine.transformers.images import Images
from areal.engine.transformers.model import TransformersModel
from areal.utils.logging import getLogger

logger = getLogger("engine")

PASS_TOKENS = 16384
"""Tokens computed at once, padding included: bounds memory when many requests join together."""

_Prompt = tuple[tuple[int, ...], Images]


class TransformersRunner:
    """Implements `ModelRunner`."""

    def __init__(self, model: TransformersModel, *, caches: bool) -> None:
        """`caches` is whether keys and values are kept."""
        self.model = model
        self.caches = caches
        self._cache = RowCache(model.device) if caches else None
        self._rows: dict[int, _Prompt] = {}
        """The tokens and images of each row, where nothing is cached."""

    def named_weights(self) -> NamedTensors:
        return self.model.named_weights()

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def max_positions(self) -> int:
        return self.model.max_positions

    def check(self, ids: Sequence[int], images: Sequence[bytes]) -> None:
        self.model.check(ids, tuple(images))

    @torch.no_grad()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], images: Sequence[Images] = ()) -> Tensor:
        """Fill rows with prompts, equal ones computed once; return the logits [B,V] after each."""
        asked = [(tuple(prompt), each) for prompt, each in zip(prompts, images or [()] * len(prompts), strict=True)]
        if self._cache is None:
            self._rows |= zip(rows, asked, strict=True)
        rows_of: dict[_Prompt, list[int]] = {}
        for row, prompt in zip(rows, asked, strict=True):
            rows_of.setdefault(prompt, []).append(row)
        found: dict[_Prompt, Tensor] = {}
        for part in self._passes(list(rows_of)):
            found |= zip(part, self._compute(part, rows_of), strict=True)
        return torch.stack([found[prompt] for prompt in asked])

    @torch.no_grad()
    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first B rows; return the logits [B,V] after it."""
        if self._cache is not None:
            mask, places = self._cache.begin(positions)
            options = {"attention_mask": mask, "position_ids": places[:, None], "use_cache": True}
            options["past_key_values"] = self._cache
            column = torch.zeros(1, dtype=torch.long, device=self.model.device)
            return self.model.logits(self.model.sent(torch.tensor(ids))[:, None], (), column, **options)[:, 0]
        rows = range(len(ids))
        held = [self._rows[row] for row in rows]
        prompts = [[*tokens[:at], token] for (tokens, _), token, at in zip(held, ids, positions, strict=True)]
        return self.prefill(rows, prompts, [images for _, images in held])

    def move(self, source: int, target: int, length: int) -> None:
        if self._cache is None:
            self._rows[target] = self._rows.pop(source)
        else:
            self._cache.move(source, target, length)

    def reset(self) -> None:
        self._cache = RowCache(self.model.device) if self.caches else None
        self._rows.clear()

    def _passes(self, prompts: Sequence[_Prompt]) -> Iterator[list[_Prompt]]:
        """Prompts of similar length whose images have one shape, as many as fit."""
        shapes = {prompt: self.model.shape(prompt[1]) for prompt in prompts}
        part: list[_Prompt] = []
        for prompt in sorted(prompts, key=lambda each: (str(shapes[each]), len(each[0]))):
            ends = {len(tokens) for tokens, _ in [*part, prompt]}
            fits = self.model.fits(len(part) + 1, len(prompt[0]), len(ends), PASS_TOKENS)
            if part and not (fits and shapes[prompt] == shapes[part[0]]):
                yield part
                part = []
            part.append(prompt)
        yield part

    def _compute(self, part: Sequence[_Prompt], rows_of: dict[_Prompt, list[int]]) -> Tensor:
        """One pass over prompts: each into its rows; the logits [B,V] after each."""
        from transformers import DynamicCache

        options: dict[str, Any] = {}
        if self._cache is not None:
            options = {"past_key_values": DynamicCache(), "use_cache": True}
        ends = torch.tensor([len(tokens) - 1 for tokens, _ in part])
        columns, place = map(self.model.sent, ends.unique(return_inverse=True))
        ids = self.model.sent(self.model.padded([tokens for tokens, _ in part]))
        logits = self.model.logits(ids, [images for _, images in part], columns, **options)
        if self._cache is not None:
            pairs = [(row, source) for source, prompt in enumerate(part) for row in rows_of[prompt]]
            rows, sources = zip(*pairs, strict=True)
            self._cache.fill(rows, sources, options["past_key_values"])
        return logits[torch.arange(len(part), device=logits.device), place]


_Pair = tuple[Tensor, Tensor]
"""Keys and values of one layer [rows, heads, length, dimension]."""


class RowCache(Cache):
    """Keys and values of running sequences, a row each, as transformers models write and read them.

    A decode step writes at each row's own position; what follows it in the row is hidden by the step's mask. Rows grow
    by doubling and never shrink.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(layers=[])
        self._device = device
        self._pairs: list[_Pair] = []
        self._places = torch.empty(0, dtype=torch.long, device=device)
        self._length = 0

    def fill(self, rows: Sequence[int], sources: Sequence[int], filled: Cache) -> None:
        """Take the keys and values of a prefill: row `rows[i]` gets its sequence `sources[i]`."""
        targets, taken = (to_device(torch.tensor(each), self._device) for each in (rows, sources))
        for index, layer in enumerate(filled.layers):
            if index == len(self._pairs):
                self._pairs.append((_nothing(layer.keys), _nothing(layer.values)))
            pair = self._pairs[index] = _grown(self._pairs[index], max(rows) + 1, layer.keys.shape[2])
            for held, new in zip(pair, (layer.keys, layer.values), strict=True):
                held[targets, :, : new.shape[2]] = new[taken]

    def begin(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A decode step of the first B rows at `positions`; returns its additive mask [B,1,1,L], and `positions`."""
        self._places, self._length = to_device(torch.tensor(positions), self._device), max(positions) + 1
        self._pairs = [_grown(pair, len(positions), self._length) for pair in self._pairs]
        hidden = torch.arange(self._length, device=self._device) > self._places[:, None]
        mask = torch.zeros(len(positions), 1, 1, self._length, device=self._device)
        return mask.masked_fill_(hidden[:, None, None], torch.finfo(torch.float32).min), self._places

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> _Pair:
        keys, values = self._pairs[layer_idx]
        batch = len(self._places)
        rows = torch.arange(batch, device=self._device)
        keys[rows, :, self._places] = key_states[:, :, 0]
        values[rows, :, self._places] = value_states[:, :, 0]
        return keys[:batch, :, : self._length], values[:batch, :, : self._length]

    @torch.no_grad()
    def move(self, source: int, target: int, length: int) -> None:
        for held in (tensor for pair in self._pairs for tensor in pair):
            held[target, :, :length] = held[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0, like.shape[1], 0, like.shape[3])


def _grown(pair: _Pair, rows: int, length: int) -> _Pair:
    keys, values = pair
    if rows <= keys.shape[0] and length <= keys.shape[2]:
        return pair
    rows = keys.shape[0] if rows <= keys.shape[0] else max(rows, 2 * keys.shape[0], 8)
    length = keys.shape[2] if length <= keys.shape[2] else max(length, 2 * keys.shape[2], 64)
    return _copied(keys, rows, length), _copied(values, rows, length)


def _copied(old: Tensor, rows: int, length: int) -> Tensor:
    new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new


_TOLERANCE = 1e-3
"""How much cached and recomputed logits may differ, as a share of the logits' own spread."""


def may_cache(model: TransformersModel) -> bool:
    """Whether cached keys and values give the logits that computing all tokens again gives: a short trial of both."""
    if _attends_to_a_part(model):
        return False
    try:
        differs = max(_differences(model))
    except Exception as error:  # an architecture may object to a cache that is not its own in any way it likes
        logger.info("keys and values of this architecture are not cached: %r", error)
        return False
    if differs > _TOLERANCE:
        logger.info("keys and values of this architecture are not cached: logits would differ by %.1e", differs)
    return differs <= _TOLERANCE


def _attends_to_a_part(model: TransformersModel) -> bool:
    """Whether some layer does not attend to all earlier tokens; a short trial would not show it."""
    config = model.module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return bool(kinds - {"full_attention"}) or (window is not None and window < model.max_positions)


def _differences(model: TransformersModel) -> Iterator[float]:
    """How much logits differ along sequences of different length, one with an image."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return model.as_text(torch.randint(model.vocab_size, (count,), generator=draw))

    runners = [TransformersRunner(model, caches=caches) for caches in (False, True)]
    placeholders, image = ([], ()) if model.images is None else model.images.example()
    prompts, images = [[*tokens(2), *placeholders, *tokens(9)], tokens(5), tokens(8)], [image, (), ()]
    yield _relative_difference(*(runner.prefill(range(3), prompts, images) for runner in runners))
    for step in range(3):
        new, positions = tokens(3), [len(prompt) + step for prompt in prompts]
        yield _relative_difference(*(runner.decode(new, positions) for runner in runners))


def _relative_difference(expected: Tensor, got: Tensor) -> float:
    """The largest difference, as a share of the logits' spread."""
    expected, got = (logits.masked_fill(logits == -torch.inf, 0.0) for logits in (expected, got))
    return float(to_host((expected - got).abs().max() / expected.std())[0])
