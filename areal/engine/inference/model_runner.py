"""What the embedded engine asks of a model: next-token logits, with a cache row per running sequence."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from areal.api.messages import Array
from areal.engine.inference.sampler import Sampled, SamplingParams
from areal.engine.model.device import to_device
from areal.engine.model.live import HoldsWeights


class ModelRunner(HoldsWeights, Protocol):
    """Whole prompts, then one token each. Shapes: B sequences, V vocabulary.

    Arguments are on the host; logits stay on the device that computed them.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    def check(self, ids: Sequence[int], images: Sequence[bytes]) -> None:
        """Raise RequestError for images that the model cannot take, before they can hurt other requests."""
        ...

    def prefill(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]]
    ) -> Tensor:
        """Fill cache rows with prompts and their images; return the logits [B,V] after each."""
        ...

    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first B rows; return the logits [B,V] after it."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Move the sequence in row `source`, of that many tokens, to row `target`."""
        ...

    def reset(self) -> None:
        """Forget every row and whatever else is cached. It must work after any failure, in whatever state that left."""
        ...


@dataclass(frozen=True)
class Piece:
    """The tokens `ids[start:end]` of a prompt, to be computed in the next step."""

    rows: list[int]
    """Those that get the prompt when it is complete."""
    ids: list[int]
    start: int
    end: int
    continued: bool = False
    """Earlier pieces of the prompt computed the tokens before `start`; otherwise these are a cached prefix."""
    images: tuple[bytes, ...] = ()

    @property
    def last(self) -> bool:
        return self.end == len(self.ids)


@runtime_checkable
class MixedRunner(Protocol):
    """What the engine can use beyond that: prompts in pieces, in one step with running sequences, and cached prefixes.

    A runner without these is driven through `WholePrompts`.
    """

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that may share a step with running sequences."""
        ...

    @property
    def shortest_prefix(self) -> int:
        """Prefixes of fewer tokens are not cached."""
        ...

    def cached_tokens(self, ids: list[int]) -> int:
        """How many tokens of a prompt need not be computed; never all."""
        ...

    def forward(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """One token for each of the first B rows, and the pieces; the logits after each row, then each last piece.

        At most one piece is not its prompt's last, and its prompt is the first of the next step's.
        """
        ...

    def remember(self, row: int, ids: list[int]) -> None:
        """Cache what the row holds: a later prompt may begin with it."""
        ...

    def move(self, source: int, target: int, length: int) -> None: ...


@runtime_checkable
class PreparingRunner(Protocol):
    """A runner that makes something of its weights, and can make it of new ones before these take their place."""

    def prepare(self, changes: Sequence[tuple[Tensor, Tensor]]) -> object:
        """What `adopt` takes once each of these tensors has its new values. May be called in another thread."""
        ...

    def adopt(self, prepared: object) -> None:
        """The tensors have just got the values that this was prepared for."""
        ...


@runtime_checkable
class SamplingRunner(Protocol):
    """A runner that draws tokens too, as `sampler.sample` does and sooner."""

    def sample(
        self, logits: Tensor, params: SamplingParams, counts: Sequence[int] | Array, banned: Tensor | None = None
    ) -> Sampled: ...


class WholePrompts:
    """A `MixedRunner` on a plain `ModelRunner`: a prompt is one piece, and no prefix is cached."""

    chunk_tokens = sys.maxsize
    shortest_prefix = sys.maxsize

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.move = runner.move

    def cached_tokens(self, ids: list[int]) -> int:
        return 0

    def forward(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        parts = []
        if len(ids):
            parts.append(self._runner.decode(ids.tolist(), positions.tolist()))
        if pieces:
            parts.append(self._prefill(pieces))
        return torch.cat(parts)

    def remember(self, row: int, ids: list[int]) -> None:
        pass

    def _prefill(self, pieces: Sequence[Piece]) -> Tensor:
        pairs = [(row, piece) for piece in pieces for row in piece.rows]
        logits = self._runner.prefill(
            [row for row, _ in pairs], [piece.ids for _, piece in pairs], [piece.images for _, piece in pairs]
        )
        firsts = [i for i, (row, piece) in enumerate(pairs) if row == piece.rows[0]]
        return logits[to_device(torch.tensor(firsts), logits.device)]
