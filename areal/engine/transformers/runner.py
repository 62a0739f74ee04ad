"""Generate with a transformers model: prompts with images in, next-token logits out.

Where every layer attends to all earlier tokens, keys and values are kept, and a token costs one small step. Any other
architecture (sliding windows, recurrence, positions that depend on images) is computed again from all of its tokens at
each step: slower, and right. `may_cache` finds out which of the two it is.

Row i belongs to the i-th running sequence. Shapes: B sequences, L positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.engine.model.device import to_host
from areal.engine.model.published import NamedTensors
from areal.engine.transformers.images import Images
from areal.engine.transformers.model import TransformersModel
from areal.utils.logging import getLogger

if TYPE_CHECKING:
    from areal.engine.transformers.row_cache import RowCache

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
        self._cache = self._empty_cache()
        self._rows: dict[int, _Prompt] = {}
        """The tokens and images of each row, where nothing is cached."""

    def named_weights(self) -> NamedTensors:
        return self.model.named_weights()

    def linear_weights(self) -> NamedTensors:
        return self.model.linear_weights()

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
        self._cache = self._empty_cache()
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

    def _empty_cache(self) -> "RowCache | None":
        if not self.caches:
            return None
        from areal.engine.transformers.row_cache import RowCache  # loads transformers, which takes a second

        return RowCache(self.model.device)

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
