"""How fast do ranks train, and what of it is communication? One rank, two of them, and this package's own decoder.

A random model of 30M parameters is trained on batches of groups with shared prompts, one thread for each rank. The ways
take turns, a few rounds of all, on open processes that wait while another way computes. The machine's speed changes
during a measurement, so each round compares its ways with each other, and the median of the rounds counts.

Communication is what two ranks need beyond two separate ones that compute the same halves of the batch at the same
time: so it is not mistaken for caches and memory that both cores share. gloo carries it over loopback.

`published` is a version of the weights on its way to engines: seconds until every rank has written its part, and bytes.
Memory is compared with the estimate of `areal doctor`, in processes of their own (benchmarks/memory.py).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from areal.config.training import ActorConfig, SchedulerConfig
from areal.engine.models import open_trainable
from areal.engine.training.engine import Loss, TokenBatch, TrainingEngine
from areal.engine.training.figures import Figures
from areal.engine.training.packing import Span
from areal.engine.training.supervised import mean_nll
from areal.trainer.cluster import Cluster
from areal.trainer.ranks import RankedEngine, deal, rank_asks
from benchmarks.memory import Case, make_model, measure
from benchmarks.report import Aim, main

MODEL, VOCABULARY = "30M", 32000
GROUPS, SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 4, 4, 64, 64
MAX_TOKENS = 2048
ROUNDS = 5
MEMORY_CASES = [Case("0.3M", 16384), Case("30M", 1024, backend="fsdp:d2")]
LEAST_SPEEDUP = 1.5
MOST_OFF = 0.15


class Trained(Protocol):
    def train_batch(self, batch: TokenBatch, loss: Loss, place: int | None = None) -> Figures: ...


def random_batch(seed: int) -> TokenBatch:
    draw = np.random.default_rng(seed)
    spans = []
    for group in range(GROUPS):
        prompt = draw.integers(0, VOCABULARY, PROMPT_TOKENS)
        for _ in range(SAMPLES):
            ids = np.concatenate([prompt, draw.integers(0, VOCABULARY, ANSWER_TOKENS)])
            spans.append(Span(ids, np.arange(PROMPT_TOKENS, len(ids)), group))
    count = GROUPS * SAMPLES * ANSWER_TOKENS
    return TokenBatch(spans, torch.ones(count), {"weights": torch.full((count,), 1 / count)})


@contextmanager
def opened_ranks(model: Path, backend: str, logs: Path) -> Iterator[RankedEngine]:
    actor = ActorConfig(backend=backend, max_tokens_per_mb=MAX_TOKENS)
    with Cluster(SchedulerConfig(), logs, [model]) as cluster:
        cluster.reserve(rank_asks(actor))
        yield RankedEngine(cluster, actor, model, total_steps=100, threads=1)


def seconds_of(*steps: tuple[Trained, TokenBatch]) -> float:
    """Of steps that are taken at the same time."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(steps)) as pool:
        for done in [pool.submit(engine.train_batch, batch, mean_nll, 0) for engine, batch in steps]:
            done.result()
    return time.perf_counter() - began


def speeds(model: Path, logs: Path, rounds: int) -> tuple[dict[str, Any], list[Aim]]:
    torch.set_num_threads(1)
    decoder = TrainingEngine(
        open_trainable(model), ActorConfig().optimizer, total_steps=100, max_tokens_per_mb=MAX_TOKENS
    )
    with ExitStack() as stack:
        one, other, two, pair = (
            stack.enter_context(opened_ranks(model, backend, logs))
            for backend in ("fsdp:d1", "fsdp:d1", "fsdp:d2", "fsdp:t2")
        )
        taken: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            batch = random_batch(number)
            half, rest = (share.batch for share in deal(batch, 2))
            found = {
                "one process": seconds_of((decoder, batch)),
                "one rank": seconds_of((one, batch)),
                "two ranks, d2": seconds_of((two, batch)),
                "two ranks, t2": seconds_of((pair, batch)),
                "two separate halves": seconds_of((one, half), (other, rest)),
            }
            if number:  # the first is for warming up
                for way, seconds in found.items():
                    taken.setdefault(way, []).append(seconds)
        began = time.perf_counter()
        update = two.publish()
        published = {
            "seconds": round(time.perf_counter() - began, 3),
            "bytes": sum(shard.size_bytes for shard in update.shards),
            "bytes by rank": [shard.size_bytes for shard in update.shards],
        }

    def ratio(way: str, over: str) -> float:
        return statistics.median(a / b for a, b in zip(taken[way], taken[over], strict=True))

    tokens = GROUPS * (PROMPT_TOKENS + SAMPLES * ANSWER_TOKENS)
    speedup = ratio("one rank", "two ranks, d2")
    figures = {
        "tokens_per_second": {way: round(tokens / statistics.median(each), 1) for way, each in taken.items()},
        "seconds_per_step": {way: round(statistics.median(each), 3) for way, each in taken.items()},
        "speedup_of_two_ranks": {"d2": round(speedup, 3), "t2": round(ratio("one rank", "two ranks, t2"), 3)},
        "speedup_without_communication": round(ratio("one rank", "two separate halves"), 3),
        "share_of_communication": {
            "d2": round(1 - ratio("two separate halves", "two ranks, d2"), 3),
            "t2": round(1 - ratio("two separate halves", "two ranks, t2"), 3),
        },
        "one_rank_over_one_process": round(ratio("one process", "one rank"), 3),
        "published": published,
    }
    return figures, [Aim.at_least("tokens/s of two ranks (d2) over one, one thread each", speedup, LEAST_SPEEDUP)]


def run(rounds: int) -> tuple[dict[str, Any], list[Aim]]:
    with tempfile.TemporaryDirectory(prefix="areal-") as place:
        figures, aims = speeds(make_model(MODEL, Path(place)), Path(place) / "logs", rounds)
    memory = [measure(case) for case in MEMORY_CASES]
    aims += [Aim.at_most(f"memory, off by: {each['case']}", abs(each["ratio"] - 1), MOST_OFF) for each in memory]
    return {**figures, "memory": memory}, aims


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    main(__doc__, lambda: run(parser.parse_known_args()[0].rounds), parser)
