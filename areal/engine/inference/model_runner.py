"""What the embedded engine asks of a model: next-token logits, with a cache row per running sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


class ModelRunner(Protocol):
    @property
    def flat(self) -> Tensor:
        """Every parameter, in one float32 buffer that new weights are copied into."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    def check(self, ids: Sequence[int], images: Sequence[bytes]) -> None:
        """Raise RequestError for pictures that cannot be shown, before they can hurt others."""
        ...

    def prefill(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]]
    ) -> Tensor:
        """Fill cache rows with prompts and their pictures; return the logits [B,V] after each."""
        ...

    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first B rows; return the logits [B,V] after it."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Let the sequence in row `source` live in row `target`."""
        ...


@dataclass(frozen=True)
class Piece:
    """The tokens `ids[start:end]` of a prompt, to be computed in the next step."""

    rows: list[int]
    """Those that get the prompt when it is complete."""
    ids: list[int]
    start: int
    end: int
    staged: bool = False
    """The tokens before `start` were computed by earlier pieces; otherwise they are remembered."""
    images: tuple[bytes, ...] = ()

    @property
    def last(self) -> bool:
        return self.end == len(self.ids)


@runtime_checkable
class MixedRunner(Protocol):
    """What the engine can use beyond that: prompts in pieces beside running sequences, and remembered prefixes.

    A runner without these is driven through `WholePrompts`.
    """

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that may share a step with running sequences."""
        ...

    @property
    def shortest_prefix(self) -> int:
        """Fewer tokens than these are not remembered."""
        ...

    def known(self, ids: list[int]) -> int:
        """How many tokens of a prompt need not be computed; never all."""
        ...

    def forward(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """One token for each of the first B rows, and the pieces; the logits after each row, then each last piece.

        At most one piece is not its prompt's last, and its prompt is the first of the next step's.
        """
        ...

    def remember(self, row: int, ids: list[int]) -> None:
        """A later prompt may begin with what the row holds."""
        ...

    def move(self, source: int, target: int, length: int) -> None: ...
