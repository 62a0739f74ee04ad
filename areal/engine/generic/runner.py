"""Serve a transformers model: prompts with pictures in, next-token logits out.

Where every layer looks back at everything, keys and values are kept in slots, and a token costs one small step. Any
other architecture (windows, recurrence, positions that depend on pictures) is computed anew from its tokens at each
step: slower, and right. `trial.py` finds out which of the two it is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from areal.engine.generic.cache import SlottedCache
from areal.engine.generic.model import GenericModel
from areal.engine.generic.pictures import Images

PASS_TOKENS = 16384
"""Tokens computed at once, padding included: bounds memory when many requests join together."""

Prompt = tuple[tuple[int, ...], Images]


class GenericRunner:
    def __init__(self, model: GenericModel, *, caches: bool) -> None:
        """`caches` says whether keys and values are kept."""
        self.model = model
        self._rows: dict[int, Prompt] = {}
        """What each row holds, where nothing is cached."""
        self.caches = caches
        self._cache = SlottedCache() if caches else None

    @property
    def flat(self) -> Tensor:
        return self.model.flat

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
        asked = [(tuple(prompt), seen) for prompt, seen in zip(prompts, images or [()] * len(prompts), strict=True)]
        if self._cache is None:
            self._rows |= zip(rows, asked, strict=True)
        homes: dict[Prompt, list[int]] = {}
        for row, prompt in zip(rows, asked, strict=True):
            homes.setdefault(prompt, []).append(row)
        found: dict[Prompt, Tensor] = {}
        for part in self._passes(list(homes)):
            found |= zip(part, self._compute(part, homes), strict=True)
        return torch.stack([found[prompt] for prompt in asked])

    @torch.no_grad()
    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first B rows; return the logits [B,V] after it."""
        if self._cache is not None:
            mask, places = self._cache.begin(positions), torch.tensor(positions)
            options = {"attention_mask": mask, "position_ids": places[:, None], "use_cache": True}
            options["past_key_values"] = self._cache
            return self.model.logits(torch.tensor(ids)[:, None], (), torch.tensor([0]), **options)[:, 0]
        rows = range(len(ids))
        held = [self._rows[row] for row in rows]
        prompts = [[*tokens[:at], token] for (tokens, _), token, at in zip(held, ids, positions, strict=True)]
        return self.prefill(rows, prompts, [images for _, images in held])

    def move(self, source: int, target: int, length: int) -> None:
        """Let the sequence in row `source` live in row `target`."""
        if self._cache is None:
            self._rows[target] = self._rows.pop(source)
        else:
            self._cache.move(source, target, length)

    def _compute(self, part: Sequence[Prompt], homes: dict[Prompt, list[int]]) -> Tensor:
        """One pass over prompts: each into its rows; the logits [B,V] after each."""
        from transformers import DynamicCache

        options: dict[str, Any] = {}
        if self._cache is not None:
            options = {"past_key_values": DynamicCache(), "use_cache": True}
        ends = torch.tensor([len(tokens) - 1 for tokens, _ in part])
        columns, place = ends.unique(return_inverse=True)
        ids = self.model.padded([tokens for tokens, _ in part])
        logits = self.model.logits(ids, [images for _, images in part], columns, **options)
        if self._cache is not None:
            pairs = [(row, source) for source, prompt in enumerate(part) for row in homes[prompt]]
            rows, sources = zip(*pairs, strict=True)
            self._cache.fill(rows, sources, options["past_key_values"])
        return logits[torch.arange(len(part)), place]

    def _passes(self, prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
        """Prompts of similar length whose pictures have one shape, as many as fit."""
        shapes = {prompt: self.model.shape(prompt[1]) for prompt in prompts}
        part: list[Prompt] = []
        for prompt in sorted(prompts, key=lambda each: (str(shapes[each]), len(each[0]))):
            ends = {len(tokens) for tokens, _ in [*part, prompt]}
            fits = self.model.fits(len(part) + 1, len(prompt[0]), len(ends), PASS_TOKENS)
            if part and not (fits and shapes[prompt] == shapes[part[0]]):
                yield part
                part = []
            part.append(prompt)
        yield part
