"""What the embedded engine asks of a model: next-token logits, with a cache row per running sequence."""

from collections.abc import Sequence
from typing import Protocol

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
