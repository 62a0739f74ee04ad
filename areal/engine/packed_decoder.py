"""The decoder as a model that learns: packed sequences, each shared prefix once, the head only where the loss is."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal.engine.architecture import Architecture, write_architecture
from areal.engine.decoder import Decoder, parameter_count
from areal.engine.packing import Pack, Span, pack
from areal.engine.weights import load_weights, save_weights

HEAD_ELEMENTS = 1 << 24
"""Logits held at once: positions times vocabulary."""


class PackedDecoder:
    """Implements `TrainableModel`."""

    def __init__(self, architecture: Architecture, *, gradient_checkpointing: bool = False) -> None:
        """The weights are zeros, to be loaded or initialised."""
        self._gradient_checkpointing = gradient_checkpointing
        size = parameter_count(architecture)
        self.flat, self.flat_grad = torch.zeros(size), torch.zeros(size)
        self.decoder = Decoder(architecture, self.flat, self.flat_grad)
        self.matrices = sum(p.numel() for p in self.decoder.parameters.values() if p.dim() > 1)

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterator[Pack]:
        return pack(spans, max_tokens)

    def logprobs(self, part: Pack, temperatures: Tensor) -> Tensor:
        forgets = self._gradient_checkpointing and torch.is_grad_enabled()
        hidden = self.decoder.hidden(part.ids, part.positions, part.attend, forgets=forgets)[part.sources]
        rows = max(1, HEAD_ELEMENTS // self.decoder.architecture.vocab_size)
        pieces = list(zip(hidden.split(rows), part.targets.split(rows), temperatures.split(rows), strict=True))
        if len(pieces) == 1:
            return self._token_logprobs(*pieces[0])
        return torch.cat([checkpoint(self._token_logprobs, *piece, use_reentrant=False) for piece in pieces])

    def load(self, directory: Path) -> None:
        load_weights(self.decoder, directory)

    def save(self, directory: Path) -> None:
        save_weights(self.decoder, directory)
        write_architecture(self.decoder.architecture, directory)

    def _token_logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        return token_logprobs(self.decoder.logits(hidden), targets, temperatures)


def token_logprobs(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probability [n] of each target under logits [n,V] at its temperature."""
    logits = logits / temperatures[:, None]
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)
