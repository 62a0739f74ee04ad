"""Is the estimate of a training step's memory right? The arithmetic of `areal/engine/memory.py` against real processes.

Each case is a process of its own (on ranks, one for each) that trains a random model for two steps, the second of two
passes, so that weights, gradients, moments and a pass's activations are there at once. Measured is the largest resident
memory (the kernel's VmHWM) less a baseline: the process's resident memory after it has imported everything and trained
a model of a few thousand parameters, but before it makes the one in question. What is subtracted so is the interpreter,
torch's code and its thread pools, which every process has whatever it trains; `areal doctor` counts them as `runtime`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from areal.config.parallel import Ranks
from areal.engine.memory import Training, heap_bytes, pass_terms, state_terms
from areal.engine.model.architecture import Architecture, write_architecture
from areal.engine.model.shape import read_shape
from benchmarks.report import Aim, main

MIB = 1 << 20
CASE_SECONDS = 1800.0
WITHIN = 0.15
"""The estimate may be off by this share of what was measured."""
MAP_VARIABLE, MAPPED_FROM = "MALLOC_MMAP_THRESHOLD_", 128 << 10
TINY = Architecture("llama", 64, 16, 2, 2, 1, 8, 32, 256, tied_embeddings=True)
"""Trained first, before the baseline is taken."""


@dataclass(frozen=True)
class Case:
    model: str
    """One of `MODELS`."""
    tokens: int
    """Of a pass."""
    backend: str = ""
    """As in `actor.backend`."""
    checkpointing: bool = False
    dtype: str = "float32"
    repeats: int = 1
    """Processes that are measured; their median counts."""
    mapped: bool = False
    """Every tensor is mapped, and given back when it is freed: what is measured then is what tensors take."""

    @property
    def name(self) -> str:
        extras = [self.backend or "one process", f"{self.tokens} tokens"]
        extras += ["checkpointing"] if self.checkpointing else []
        extras += [self.dtype] if self.dtype != "float32" else []
        extras += ["mapped"] if self.mapped else []
        return ", ".join([self.model, *extras])


MODELS: dict[str, Architecture | None] = {
    "0.3M": None,  # the built-in one
    "30M": Architecture("qwen3", 32000, 384, 12, 6, 2, 64, 1024, 4096, tied_embeddings=True),
    "135M": Architecture("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, tied_embeddings=True),
}
MAPPED_CASES = [Case("0.3M", 16384, mapped=True), Case("30M", 1024, mapped=True)]
SMALL_CASES = [Case("0.3M", 16384, repeats=3), Case("30M", 1024), *MAPPED_CASES]
CASES = [
    *SMALL_CASES,
    Case("30M", 1024, checkpointing=True),
    Case("30M", 1024, backend="fsdp:d1"),
    Case("30M", 1024, backend="fsdp:d2"),
    Case("30M", 512, backend="fsdp:d2", mapped=True),
    Case("135M", 512),
    Case("135M", 512, mapped=True),
    Case("135M", 512, backend="fsdp:d1"),
]


def make_model(name: str, place: Path) -> Path:
    """A directory with that model; random weights, unless it is the built-in one."""
    import torch

    from areal.engine.model.decoder import Decoder, initialise
    from areal.engine.model.weights import save_weights
    from areal.engine.models import find_model

    architecture = MODELS.get(name, TINY)
    if architecture is None:
        return find_model("builtin:tiny-math")
    directory = place / name
    if not directory.exists():
        directory.mkdir()
        decoder = Decoder(architecture)
        initialise(decoder, torch.Generator().manual_seed(0))
        save_weights(decoder, directory)
        write_architecture(architecture, directory)
    return directory


def estimate(case: Case, model: Path) -> dict[str, int]:
    """What `areal doctor` says of one process, by what it is for."""
    shape, ranks = read_shape(model), Ranks.parse(case.backend) if case.backend else None
    training = Training(case.tokens, ranks, dtype=case.dtype, checkpointing=case.checkpointing)
    heap = {} if case.mapped else {"heap": heap_bytes(shape, training)}
    return {**state_terms(shape, training), **pass_terms(shape, training), **heap}


def measure(case: Case) -> dict[str, Any]:
    """Measured and estimated MiB of one process."""
    with tempfile.TemporaryDirectory(prefix="areal-") as place:
        model, tiny = make_model(case.model, Path(place)), make_model("tiny", Path(place))
        found = [_measured(case, model, tiny) for _ in range(case.repeats)]
        parts = estimate(case, model)
    taken = statistics.median(each["peak"] - each["baseline"] for each in found)
    return {
        "case": case.name,
        "measured_mib": round(taken / MIB, 1),
        "estimated_mib": round(sum(parts.values()) / MIB, 1),
        "ratio": round(sum(parts.values()) / taken, 3),
        "baseline_mib": round(found[0]["baseline"] / MIB, 1),
        "terms_mib": {name: round(size / MIB, 1) for name, size in parts.items()},
    }


def _measured(case: Case, model: Path, tiny: Path) -> dict[str, int]:
    """Of a fresh process; of ranks, the one that takes the most."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "benchmarks.memory", "--child"]
    argv += [json.dumps(asdict(case)), str(model), str(tiny), str(port)]
    env = {**os.environ, **({MAP_VARIABLE: str(MAPPED_FROM)} if case.mapped else {})}
    started = [
        subprocess.Popen([*argv, str(rank)], stdout=subprocess.PIPE, text=True, env=env)
        for rank in range(Ranks.parse(case.backend).count if case.backend else 1)
    ]
    try:
        printed = [process.communicate(timeout=CASE_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "a measured process failed; see its error above"
    found: list[dict[str, int]] = [json.loads(text.strip().split("\n")[-1]) for text in printed]
    return max(found, key=lambda each: each["peak"] - each["baseline"])


def child(case: Case, model: Path, tiny: Path, port: int, rank: int) -> dict[str, int]:
    """In the measured process."""
    import torch

    torch.set_num_threads(1)
    step = _on_ranks(case, port, rank) if case.backend else _alone(case)
    step(tiny, 64)
    baseline = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the largest so far
    step(model, case.tokens)
    return {"baseline": baseline, "peak": _status("VmHWM")}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = [int(line.split()[1]) for line in lines if line.startswith(f"{name}:")]
    return kib * 1024


def _batches(model: Path, tokens: int) -> list[Any]:
    """One of a single pass, one of two; sequences of up to 256 tokens, every token of them trained."""
    import numpy as np
    import torch

    from areal.engine.training.engine import TokenBatch
    from areal.engine.training.packing import Span

    draw, vocabulary = np.random.default_rng(0), read_shape(model).vocab_size
    length = min(256, tokens)

    def batch(passes: int) -> TokenBatch:
        count = passes * tokens // length
        spans = [
            Span(draw.integers(0, vocabulary, length + 1), np.arange(1, length + 1), group) for group in range(count)
        ]
        total = count * length
        return TokenBatch(spans, torch.ones(total), {"weights": torch.full((total,), 1 / total)})

    return [batch(1), batch(2)]


def _loss(logprobs: Any, fields: dict[str, Any]) -> tuple[Any, Any]:
    from areal.engine.training.figures import Figures

    return -(logprobs * fields["weights"]).sum(), Figures()


def _alone(case: Case) -> Callable[[Path, int], None]:
    from areal.config.training import OptimizerConfig
    from areal.engine.models import open_trainable
    from areal.engine.training.engine import TrainingEngine

    def step(model: Path, tokens: int) -> None:
        opened = open_trainable(model, gradient_checkpointing=case.checkpointing, device="cpu")
        engine = TrainingEngine(opened, OptimizerConfig(), total_steps=10, max_tokens_per_mb=tokens, dtype=case.dtype)
        for batch in _batches(model, tokens):
            engine.train_batch(batch, _loss)

    return step


def _on_ranks(case: Case, port: int, rank: int) -> Callable[[Path, int], None]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from areal.config.training import OptimizerConfig
    from areal.engine.sharded.learner import RankLearner
    from areal.engine.sharded.model import ShardedModel

    ranks = Ranks.parse(case.backend)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(ranks.count), "LOCAL_RANK": "0"}
    store = dist.TCPStore("127.0.0.1", port, ranks.count, is_master=rank == 0, timeout=timedelta(seconds=CASE_SECONDS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks.count)

    def step(model: Path, tokens: int) -> None:
        opened = ShardedModel(
            model,
            ranks,
            torch.device("cpu"),
            dtype=case.dtype,
            gradient_checkpointing=case.checkpointing,
        )
        learner = RankLearner(opened, ranks, OptimizerConfig(), total_steps=10, max_tokens_per_mb=tokens)
        for place, batch in enumerate(_batches(model, tokens)):
            learner.train_batch(batch, _loss, place)

    return step


def compare(cases: list[Case]) -> tuple[dict[str, Any], list[Aim]]:
    """Figures and aims of these cases; benchmarks of their own may take them too."""
    found = []
    for case in cases:
        found.append(measure(case))
        print(f"{case.name}: {found[-1]}", file=sys.stderr, flush=True)
    aims = [Aim.at_most(f"{each['case']}: estimate off by", abs(each["ratio"] - 1), WITHIN) for each in found]
    return {"memory": found}, aims


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true", help="the two small models in one process only")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()
    if options.child:
        described, model, tiny, port, rank = options.child
        print(json.dumps(child(Case(**json.loads(described)), Path(model), Path(tiny), int(port), int(rank))))
    else:
        main(__doc__ or "", partial(compare, SMALL_CASES if options.small else CASES), parser)
