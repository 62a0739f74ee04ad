"""The canaries of a run: what engines of others must compute under the weights that are published to them.

Engines of this package tell the digest of their weights with every token, and get none. How vLLM and SGLang are asked,
and what is a mismatch: `areal/engine/inference/canary.py`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from areal.api.engine_api import Canary, WeightUpdate
from areal.config.experiment import PPOConfig
from areal.engine.training.engine import TokenBatch
from areal.engine.training.learner import LogProbs
from areal.engine.training.packing import Span

TEXT = (
    "In 1847 the ferry cost 3 shillings; def f(x): return x**2 - 7. She asked: who keeps 19 bees, 4 clocks and a wet "
    "umbrella? Answer: 58 percent, probably."
)
"""Words, numbers and code, none of it easy to guess: likely tokens hardly move when weights do."""
MAX_TOKENS = 32
TOLERANCES = {"float32": 0.05, "bfloat16": 0.5}
"""Nats, by what the trainer and the engine compute in, the coarser of both; rounded weights are part of it. A model of
135 million parameters on vLLM was off by 0.05 in bfloat16."""


class Canaries:
    def __init__(self, tokenizer: Any, tolerance: float) -> None:
        self._tokens = tuple(tokenizer.encode(TEXT, add_special_tokens=False)[:MAX_TOKENS])
        self._tolerance = tolerance
        self._earlier: dict[int, tuple[float, ...]] = {}
        """By version: the run's first and the latest."""

    @classmethod
    def of(cls, config: PPOConfig, tokenizer: Any) -> "Canaries | None":
        """None if every engine tells the digest of its weights."""
        if not config.rollout.foreign_engines:
            return None
        return cls(tokenizer, max(TOLERANCES[config.actor.dtype], TOLERANCES[config.rollout.dtype]))

    def attached(self, update: WeightUpdate, engine: LogProbs) -> WeightUpdate:
        """The update with what engines must compute under it. `engine` has the weights that it was published from."""
        span = Span(np.array(self._tokens), np.arange(1, len(self._tokens)), group=0)
        logprobs = tuple(engine.logprobs(TokenBatch([span], torch.ones(len(span.asked)))).tolist())
        canary = Canary(self._tokens, logprobs, self._tolerance, self._earlier)
        first = min(self._earlier, default=update.version)
        self._earlier = {first: self._earlier.get(first, logprobs), update.version: logprobs}
        return replace(update, canary=canary)
