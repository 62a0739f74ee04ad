"""One rank that opens models one after the other and compares each with one process: `family_rank.py RANK ORDER`.

Many comparisons share a process group, because it takes longer to start one than to make a comparison. What is found
goes to a file: the largest differences that this rank saw.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_harness import MAX_TOKENS, OPTIMIZER, random_batch
from torch import Tensor
from varlen_on_cpu import varlen_on_cpu

from areal.config.parallel import Ranks
from areal.engine.sharded.checkpoint import CheckpointWriter, load_optimizer
from areal.engine.sharded.export import RankWeightWriter
from areal.engine.sharded.learner import RankLearner
from areal.engine.sharded.model import ShardedModel, whole
from areal.engine.training.engine import TokenBatch
from areal.engine.training.supervised import mean_nll
from areal.trainer.ranks import deal

STEPS = 10
ADAMW = replace(OPTIMIZER, eps=1e-6)
"""With less, AdamW takes whole steps by gradients that are nothing but rounding."""
UNCLIPPED = replace(ADAMW, gradient_clipping=0.0)
"""The gradient is looked at after a step."""


def family_batch(step: int) -> TokenBatch:
    return random_batch(step, groups=3)


@dataclass(frozen=True)
class Case:
    family: str
    backend: str
    other_backend: str = ""
    """Of as many ranks, which goes on from the checkpoint; empty = none is written."""
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    varlen: bool = False


class Comparison:
    def __init__(self, case: Case, directory: Path, rank: int) -> None:
        self._case, self._directory, self._rank = case, directory, rank
        self._expected: dict[str, Any] = torch.load(directory / "expected.pt")
        self._learner: RankLearner

    def found(self) -> dict[str, float]:
        self._open(self._case.backend, self._directory, UNCLIPPED)
        found = self._first_step()
        if not self._case.other_backend:
            return found
        self._open(self._case.backend, self._directory, ADAMW)
        for step in range(STEPS):
            self._train(step)
        weights = {name: whole(each.detach()) for name, each in self._learner.model.module.named_parameters()}
        found["weights"] = _furthest(weights, self._expected["weights"])
        self._publish(self._directory / f"published-{self._case.backend}")
        return found | {"resumed": self._resumed(self._directory / f"checkpoint-{self._case.backend}")}

    def _first_step(self) -> dict[str, float]:
        share = deal(family_batch(0), self._ranks.data)[self._rank // self._ranks.tensor]
        logprobs = self._learner.scores(share.batch)
        loss = self._train(0)
        gradients = {name: whole(each.grad) for name, each in self._learner.model.module.named_parameters()}
        return {
            "logprobs": float((logprobs - self._expected["logprobs"][share.places]).abs().max()),
            "loss": abs(loss - self._expected["loss"]),
            "gradient": _furthest(gradients, self._expected["gradient"]),
        }

    def _resumed(self, directory: Path) -> float:
        """How far the loss after a checkpoint is from that without a break; another mesh reads it than wrote it."""
        directory.mkdir(exist_ok=True)
        writer = CheckpointWriter()
        writer.begin(self._learner, directory)
        writer.finish()
        expected = self._train(STEPS)
        self._open(self._case.other_backend, directory, ADAMW)
        load_optimizer(self._learner, directory)
        return abs(self._train(STEPS) - expected)

    def _publish(self, directory: Path) -> None:
        """And the log-probs that an engine should find with what is published."""
        logprobs = self._learner.scores(family_batch(STEPS))
        shards = RankWeightWriter(self._learner.model, directory, "", torch.float32).write(0).shards
        gathered: list[Any] = [None] * self._ranks.count
        dist.all_gather_object(gathered, [asdict(shard) for shard in shards])
        if self._rank == 0:
            (directory / "shards.json").write_text(json.dumps([shard for each in gathered for shard in each]))
            torch.save(logprobs, directory / "logprobs.pt")

    def _open(self, backend: str, directory: Path, optimizer: Any) -> None:
        self._ranks = Ranks.parse(backend)
        model = ShardedModel(
            directory,
            self._ranks,
            torch.device("cpu"),
            dtype=self._case.dtype,
            kernel=varlen_on_cpu if self._case.varlen else None,
            gradient_checkpointing=self._case.gradient_checkpointing,
        )
        self._learner = RankLearner(model, self._ranks, optimizer, total_steps=20, max_tokens_per_mb=MAX_TOKENS)

    def _train(self, step: int) -> float:
        """The loss of all ranks."""
        share = deal(family_batch(step), self._ranks.data)[self._rank // self._ranks.tensor]
        figures, *_ = self._learner.train_batch(share.batch, mean_nll, step)
        loss = torch.tensor(figures["loss"], dtype=torch.float64)
        dist.all_reduce(loss)
        return float(loss) / self._ranks.tensor


def _furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference in any parameter."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def compared(case: dict[str, Any], directory: Path, rank: int) -> dict[str, float]:
    return Comparison(Case(**case), directory, rank).found()


def main(compare: Callable[[dict[str, Any], Path, int], dict[str, float]]) -> None:
    """Make all comparisons of an order. `compare`: one case, the directory of its family's model, and the rank."""
    rank, order = int(sys.argv[1]), json.loads(sys.argv[2])
    count = Ranks.parse(order["cases"][0]["backend"]).count
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    directory = Path(order["directory"])
    store = dist.FileStore(str(directory / f"store-{count}"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    found = [compare(case, directory / case["family"], rank) for case in order["cases"]]
    (directory / f"found-{count}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(compared)
