"""One rank that trains adapters to models one after the other, and compares each with one process: `RANK ORDER`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from family_rank import ADAMW, UNCLIPPED, family_batch, main
from ranks_harness import MAX_TOKENS

from areal.config.parallel import Ranks
from areal.config.training import LoraConfig, OptimizerConfig
from areal.engine.sharded.adapter import AdapterLearner
from areal.engine.sharded.checkpoint import CheckpointWriter
from areal.engine.sharded.model import ShardedModel
from areal.engine.training.supervised import mean_nll
from areal.trainer.ranks import deal

STEPS = 4
SEED = 3
LORA = LoraConfig(rank=3, alpha=5.0)


@dataclass(frozen=True)
class AdapterCase:
    family: str
    backend: str
    head: bool = False
    """The head has matrices of its own, alone."""
    dtype: str = "float32"
    gradient_checkpointing: bool = False

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(rank=3, alpha=5.0, targets=["lm_head"]) if self.head else LORA


class AdapterComparison:
    def __init__(self, case: AdapterCase, directory: Path, rank: int) -> None:
        self._case, self._directory, self._rank = case, directory, rank
        self._ranks = Ranks.parse(case.backend)
        self._expected: dict[str, Any] = torch.load(directory / f"expected-{case.head}.pt")

    def found(self) -> dict[str, float]:
        learner, expected = self._open(UNCLIPPED), self._expected
        share = deal(family_batch(0), self._ranks.data)[self._rank // self._ranks.tensor]
        plain = learner.scores(share.batch)
        learner.parameters.load(self._directory / f"begin-{self._case.head}", learner.digest)
        logprobs = learner.scores(share.batch)
        self._train(learner, 0)
        found = {
            "plain": _apart(plain, expected["plain"][share.places]),
            "logprobs": _apart(logprobs, expected["logprobs"][share.places]),
            "reference": _apart(learner.base_scores(share.batch), expected["plain"][share.places]),
            "gradient": _apart(learner.parameters.flat_grad, expected["gradient"]),
        }
        learner = self._open(ADAMW)
        for step in range(STEPS):
            self._train(learner, step)
        found["weights"] = _apart(learner.parameters.flat, expected["weights"])
        checkpoint = self._directory / f"checkpoint-{self._case.backend}-{self._case.head}-{self._case.dtype}"
        checkpoint.mkdir(exist_ok=True)
        writer = CheckpointWriter()
        writer.begin(learner, checkpoint)
        writer.finish()
        dist.barrier()
        later = self._open(ADAMW)
        later.load(checkpoint)
        for each in (learner, later):
            self._train(each, STEPS)
        found["resumed"] = _apart(later.parameters.flat, learner.parameters.flat)
        return found

    def _open(self, optimizer: OptimizerConfig) -> AdapterLearner:
        model = ShardedModel(
            self._directory,
            self._ranks,
            torch.device("cpu"),
            dtype=self._case.dtype,
            gradient_checkpointing=self._case.gradient_checkpointing,
            trainable=False,
        )
        sizes = {"total_steps": 20, "max_tokens_per_mb": MAX_TOKENS}
        return AdapterLearner.open(
            model, self._case.lora, self._ranks, optimizer, seed=SEED, base_name="a model", **sizes
        )

    def _train(self, learner: AdapterLearner, step: int) -> None:
        share = deal(family_batch(step), self._ranks.data)[self._rank // self._ranks.tensor]
        learner.train_batch(share.batch, mean_nll, step)


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach() - expected.detach()).abs().max())


def compared(case: dict[str, Any], directory: Path, rank: int) -> dict[str, float]:
    return AdapterComparison(AdapterCase(**case), directory, rank).found()


if __name__ == "__main__":
    main(compared)
