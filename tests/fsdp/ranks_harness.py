"""Ranks in processes of their own, and batches whose sequences share prefixes in groups of unequal length."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal.config.training import ActorConfig, OptimizerConfig, SchedulerConfig
from areal.engine.training.engine import TokenBatch
from areal.engine.training.packing import Span
from areal.trainer.cluster import Cluster
from areal.trainer.ranks import RankedEngine, rank_asks

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, warmup_steps=0)
MAX_TOKENS = 150
"""So few that every batch takes several passes, and not equally many on each rank."""


@contextmanager
def opened_ranks(model: Path, backend: str, logs: Path, **settings: Any) -> Iterator[RankedEngine]:
    chosen: dict[str, Any] = {"optimizer": OPTIMIZER, "max_tokens_per_mb": MAX_TOKENS, **settings}
    actor = ActorConfig(backend=backend, **chosen)
    with Cluster(SchedulerConfig(), logs, [model]) as cluster:
        cluster.reserve(rank_asks(actor))
        yield RankedEngine(cluster, actor, model, total_steps=20, threads=1)


IDS = (5, 60)


def random_batch(seed: int, groups: int = 5, samples: int = 3) -> TokenBatch:
    """Weights and temperatures differ from token to token."""
    draw = np.random.default_rng(seed)
    spans = []
    for group in range(groups):
        prompt = draw.integers(*IDS, int(draw.integers(5, 30)))
        for _ in range(samples):
            ids = np.concatenate([prompt, draw.integers(*IDS, int(draw.integers(2, 30)))])
            spans.append(Span(ids, np.arange(len(prompt), len(ids)), group))
    count = sum(len(span.asked) for span in spans)
    weights, temperatures = draw.random(count), 0.5 + draw.random(count)
    fields = {"weights": torch.from_numpy(weights / weights.sum()).float()}
    return TokenBatch(spans, torch.from_numpy(temperatures).float(), fields)


def check_comparison(printed: str) -> None:
    """Whether ranks on two hosts were close enough to one process, by what `compare_ranks.py` has printed."""
    found = json.loads(printed.splitlines()[-1])
    assert len(found["hosts"]) == 2, "both hosts have ranks, and published their parts"
    assert max(found["gradient"].values()) < 1e-5
    assert max(found["ten steps"].values()) < 1e-4
    assert max(found["resume"].values()) < 1e-6
