"""What the training engine asks of a model: its weights as one buffer, and the log-probs of tokens, pass by pass."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from areal.engine.packing import Span


class Pass(Protocol):
    """Sequences, or parts of them, that are computed together."""

    @property
    def order(self) -> Tensor:
        """Which of the asked positions, counted through all spans, this pass computes, in its own order."""
        ...

    @property
    def tokens(self) -> int:
        """How many tokens of sequences are computed."""
        ...


class TrainableModel(Protocol):
    @property
    def flat(self) -> Tensor:
        """Every parameter, in one float32 buffer."""
        ...

    @property
    def flat_grad(self) -> Tensor:
        """Where gradients gather."""
        ...

    @property
    def matrices(self) -> int:
        """How many leading values of the buffer belong to matrices, which weight decay is for."""
        ...

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterable[Any]:
        """Cut spans into passes of at most `max_tokens` tokens (a single longer sequence gets one of its own)."""
        ...

    def logprobs(self, part: Any, temperatures: Tensor) -> Tensor:
        """Log-probability of each token that a pass asks for, in its order; differentiable."""
        ...

    def load(self, directory: Path) -> None:
        """Take the weights of a Hugging Face directory of the same architecture."""
        ...

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face's format (the tokenizer is the caller's)."""
        ...
