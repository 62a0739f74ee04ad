"""Choose tokens for a whole batch at once.

Each request has its own seed, and its n-th token uses the n-th number of that seed's stream, so a request's tokens do
not depend on who shares its batch.
"""

# MERGED-DOC
# What a step needs to know of the running sequences, as columns that change in place when one joins, ends or grows.
# What the sequences of a batch may not draw, as one tensor. A sequence whose grammar fails is ended here, alone.

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from areal.api.errors import RequestError
from areal.api.messages import Array
from areal.engine.inference.sequence import SequenceState

CANDIDATES = 512
"""top_p and top_k look at this many of the likeliest before they sort the whole vocabulary."""
BLOCK = 256
"""Tokens whose probabilities are summed before the search for the drawn one goes into detail."""
ONE, WEYL, MIX_1, MIX_2 = np.array((1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB), dtype=np.uint64)
S27, S30, S31, S40 = np.array((27, 30, 31, 40), dtype=np.uint64)
UNIT = np.float32(2**-24)


@dataclass
class Choices:
    """Sampling settings of the sequences in a batch, as columns [B]."""

    temperatures: Tensor
    greedy: Tensor
    top_p: Tensor
    top_k: Tensor
    seeds: Array
    limited: bool
    """Some row has top_p or top_k."""
    tempered: bool
    """Some row has a temperature other than 1."""
    some_greedy: bool

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, int, int]]) -> "Choices":
        """From (temperature, top_p, top_k, seed) rows; temperature 0 = greedy."""
        temperatures, top_p, top_k, seeds = zip(*rows, strict=True)
        return cls(
            temperatures=torch.tensor([t or 1.0 for t in temperatures]),
            greedy=torch.tensor([t == 0 for t in temperatures]),
            top_p=torch.tensor(top_p),
            top_k=torch.tensor(top_k),
            seeds=np.array(seeds, dtype=np.uint64),
            limited=any(p < 1 or k > 0 for _, p, k, _ in rows),
            tempered=any(t not in (0, 1) for t in temperatures),
            some_greedy=any(t == 0 for t in temperatures),
        )


@torch.inference_mode()
def sample(
    logits: Tensor, choices: Choices, counts: Sequence[int] | Array, banned: Tensor | None = None
) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs; `counts[b]` is how many row b has already drawn, `banned[B,V]` what it may not draw.

    Log-probs are those of the temperature-scaled distribution over the whole vocabulary (temperature 1 for greedy),
    which is what the trainer recomputes; top_p, top_k and `banned` limit the choice without changing them.
    """
    scaled = logits / choices.temperatures[:, None] if choices.tempered else logits
    allowed = scaled if banned is None else scaled.masked_fill(banned, -torch.inf)
    probs = allowed.softmax(dim=-1)
    likely = _limit(probs, choices) if choices.limited else probs
    tokens = _invert(likely, uniforms(choices.seeds, counts))
    if choices.some_greedy:
        tokens = torch.where(choices.greedy, allowed.argmax(dim=-1), tokens)
    if banned is None:  # a token that was drawn is likely enough for its logarithm to be exact
        logprobs = probs.gather(1, tokens[:, None]).log_()
    else:
        logprobs = scaled.log_softmax(dim=-1).gather(1, tokens[:, None])
    return tokens.tolist(), logprobs.squeeze(1).tolist()


def uniforms(seeds: Array, counts: Sequence[int] | Array) -> Tensor:
    """The counts[b]-th number in [0, 1) of each seed's stream (splitmix64)."""
    x = seeds + (np.asarray(counts, dtype=np.uint64) + ONE) * WEYL  # arrays wrap around without a word
    x = (x ^ (x >> S30)) * MIX_1
    x = (x ^ (x >> S27)) * MIX_2
    x = x ^ (x >> S31)
    return torch.from_numpy((x >> S40).astype(np.float32) * UNIT)


def _invert(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative probability passes u: it adds to the sum, so it is never one of probability 0.

    There is one in every row, since u has 24 bits and u * total therefore never rounds up to total.
    """
    if probs.shape[1] % BLOCK or probs.shape[1] < 16 * BLOCK:
        cumulative = probs.cumsum(dim=-1)
        return torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    blocks = probs.view(len(probs), -1, BLOCK)
    cumulative = blocks.sum(dim=-1).cumsum(dim=-1)
    point = u[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, point, right=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).cumsum(dim=-1)
    before = cumulative.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    # Sums of a block that were rounded differently must not lead out of it.
    within = torch.minimum((point - before).clamp_(min=0.0), torch.nextafter(inside[:, -1:], inside.new_zeros(())))
    return (block * BLOCK + torch.searchsorted(inside, within, right=True)).squeeze(1)


def _limit(probs: Tensor, choices: Choices) -> Tensor:
    """Zero what lies outside the likeliest top_k, and outside the smallest set that holds top_p."""
    size = probs.shape[-1]
    if size <= 2 * CANDIDATES:
        return _limit_ranked(probs, choices, *probs.sort(dim=-1, descending=True, stable=True))
    ranked, order = probs.topk(CANDIDATES, dim=-1)
    # Equal ones stand by index, as in a stable sort of all.
    order, by_index = order.sort(dim=-1)
    ranked, by_rank = ranked.gather(1, by_index).sort(dim=-1, descending=True, stable=True)
    limited = _limit_ranked(probs, choices, ranked, order.gather(1, by_rank))
    # Right if the set ends before the candidates do, and not among equals that were left out.
    ended = (limited > 0).sum(dim=-1) < (ranked > ranked[:, -1:]).sum(dim=-1)
    free = (choices.top_k <= 0) & (choices.top_p >= 1)
    limited = torch.where(free[:, None], probs, limited)
    rows = (~(ended | free)).nonzero().squeeze(1)
    if len(rows):
        some = replace(choices, top_p=choices.top_p[rows], top_k=choices.top_k[rows])
        limited[rows] = _limit_ranked(probs[rows], some, *probs[rows].sort(dim=-1, descending=True, stable=True))
    return limited


def _limit_ranked(probs: Tensor, choices: Choices, ranked: Tensor, order: Tensor) -> Tensor:
    """The same, given the likeliest in order of rank."""
    before = ranked.cumsum(dim=-1) - ranked
    rank = torch.arange(ranked.shape[-1])
    top_k = torch.where(choices.top_k > 0, choices.top_k, probs.shape[-1])
    # A row without top_p keeps its whole tail: rounding must not make it depend on who shares its batch.
    top_p = torch.where(choices.top_p < 1, choices.top_p, torch.inf)
    kept = (before < top_p[:, None]) & (rank < top_k[:, None])
    return torch.zeros_like(probs).scatter_(1, order, torch.where(kept, ranked, 0.0))


class Rows:
    """Row i belongs to the i-th running sequence."""

    def __init__(self, capacity: int) -> None:
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._positions = np.zeros(capacity, dtype=np.int64)
        self._temperatures = np.ones(capacity, dtype=np.float32)
        self._greedy = np.zeros(capacity, dtype=np.bool_)
        self._top_p = np.ones(capacity, dtype=np.float32)
        self._top_k = np.zeros(capacity, dtype=np.int64)
        self._seeds = np.zeros(capacity, dtype=np.uint64)
        self._counts = np.zeros(capacity, dtype=np.uint64)
        self._columns: tuple[Array, ...] = (
            self._ids,
            self._positions,
            self._temperatures,
            self._greedy,
            self._top_p,
            self._top_k,
            self._seeds,
            self._counts,
        )
        self._choices: Choices | None = None
        self.simple = True
        """None asks for more than a length and stop tokens; known once `choices` was read."""
        self.sequences: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def ids(self) -> Tensor:
        """The last token of each, not yet in the cache."""
        return torch.from_numpy(self._ids[: len(self.sequences)])

    @property
    def positions(self) -> Tensor:
        return torch.from_numpy(self._positions[: len(self.sequences)])

    @property
    def counts(self) -> Array:
        """How many tokens each has drawn."""
        counts: Array = self._counts[: len(self.sequences)]
        return counts

    def join(self, sequence: SequenceState) -> None:
        """The next row; its cache holds all of its tokens."""
        row, g = len(self.sequences), sequence.gconfig
        temperature = sequence.temperature
        self._positions[row] = len(sequence.ids) - 1
        self._temperatures[row] = temperature or 1.0
        self._greedy[row] = temperature == 0
        self._top_p[row] = g.top_p
        self._top_k[row] = g.top_k
        self._seeds[row] = sequence.seed
        self._counts[row] = sequence.drawn
        self.sequences.append(sequence)
        self._choices = None

    def leave(self, row: int) -> int | None:
        """Remove a row; the last one takes its place. Returns which that was, None if none had to move."""
        last = self.sequences.pop()
        self._choices = None
        if row == len(self.sequences):
            return None
        self.sequences[row] = last
        for column in self._columns:
            column[row] = column[len(self.sequences)]
        return len(self.sequences)

    def grow(self, tokens: list[int]) -> None:
        """Each has drawn a token."""
        count = len(self.sequences)
        self._ids[:count] = tokens
        self._positions[:count] += 1
        self._counts[:count] += np.uint64(1)

    def clear(self) -> list[SequenceState]:
        """Remove all, and return them."""
        sequences, self.sequences = self.sequences, []
        self._choices = None
        return sequences

    @property
    def choices(self) -> Choices:
        if self._choices is None:
            self._choices = self._read_choices(len(self.sequences))
            self.simple = all(sequence.simple for sequence in self.sequences)
        return self._choices

    def _read_choices(self, count: int) -> Choices:
        temperatures, top_p, top_k = self._temperatures[:count], self._top_p[:count], self._top_k[:count]
        greedy = self._greedy[:count]
        return Choices(
            temperatures=torch.from_numpy(temperatures),
            greedy=torch.from_numpy(greedy),
            top_p=torch.from_numpy(top_p),
            top_k=torch.from_numpy(top_k),
            seeds=self._seeds[:count],
            limited=bool((top_p < 1).any() or (top_k > 0).any()),
            tempered=bool((temperatures != 1).any()),
            some_greedy=bool(greedy.any()),
        )


def banned_tokens(sequences: list[SequenceState], logits: torch.Tensor) -> torch.Tensor | None:
    """What each may not draw [B,V]; None when everybody may draw anything."""
    rows: list[int] = []
    masks: list[Array] = []
    for row, sequence in enumerate(sequences):
        try:
            mask = sequence.banned(logits.shape[1])
        except RequestError as error:  # the fault of its own grammar: the others go on
            if not sequence.done.done():
                sequence.done.set_exception(error)
            continue
        if mask is not None:
            rows.append(row)
            masks.append(mask)
    if not rows:
        return None
    banned = torch.zeros_like(logits, dtype=torch.bool)
    banned[rows] = torch.from_numpy(np.stack(masks))
    return banned
