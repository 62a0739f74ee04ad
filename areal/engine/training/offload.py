"""A frozen model whose weights leave the device between two batches: `ref.offload`, `teacher.offload`."""

from torch import Tensor

from areal.engine.training.engine import ScoringEngine, TokenBatch


class OffloadedScoring:
    """Implements `LogProbs`. The weights come from the host's memory for a batch and are dropped after it.

    Parameters are views of one buffer. Its storage is emptied and filled, so the views stay as they are.
    """

    def __init__(self, scoring: ScoringEngine) -> None:
        self._scoring = scoring
        flat = scoring.flat.detach()
        self._kept = flat.to("cpu", copy=True)
        if flat.device.type == "cuda":
            self._kept = self._kept.pin_memory()
        self._storage = flat.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._storage.resize_(0)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        self._storage.resize_(self._bytes)
        try:
            self._scoring.flat.detach().copy_(self._kept, non_blocking=True)
            return self._scoring.logprobs(batch)
        finally:
            self._storage.resize_(0)
