"""Compare ranks on two hosts of a cluster with one process: `python compare_ranks.py SCHEDULER PLACE HOST_CPUS`.

SCHEDULER is a `SchedulerConfig` in JSON, PLACE a directory that both hosts share, HOST_CPUS what each host has. It runs
on the driver's host and prints the largest differences as JSON on its last line, which `check_comparison` reads.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ranks_harness import MAX_TOKENS, OPTIMIZER, random_batch

from areal.api.engine_api import WeightUpdate
from areal.config.parallel import Ranks
from areal.config.training import ActorConfig, OptimizerConfig, SchedulerConfig
from areal.engine.model.published import WeightReader
from areal.engine.models import find_model, open_trainable
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.supervised import mean_nll
from areal.infra.rpc.connect import connect
from areal.infra.rpc.host_weights import HostWeights
from areal.infra.rpc.wire import api_wire
from areal.trainer.cluster import Cluster
from areal.trainer.ranks import RankedEngine, rank_asks

DESCENT = OptimizerConfig(lr=1e6, eps=1e6, beta1=0.0, beta2=0.0, warmup_steps=0, gradient_clipping=0.0)
"""With so large an epsilon, AdamW subtracts the gradient itself."""


class Comparison:
    def __init__(self, scheduler: SchedulerConfig, place: Path, host_cpus: int) -> None:
        self._scheduler = scheduler
        self._place = place
        self._host_cpus = host_cpus
        self._model = find_model("builtin:tiny-math")
        self._secret = b""
        self.hosts: set[str] = set()
        """That have published weights."""

    def gradient(self, backend: str) -> float:
        """Between the gradients of one process and of ranks, over all parameters."""
        batch, flat = random_batch(0), self._one_process(DESCENT)
        flat.train_batch(batch, mean_nll, 0)
        assert float(flat.flat_grad.norm()) > 1, "there is something to compare"
        with self._ranks(backend, optimizer=DESCENT) as ranks:
            ranks.train_batch(batch, mean_nll, 0)
            return self._largest_difference(ranks, flat)

    def ten_steps(self, backend: str) -> float:
        """Between the weights of one process and of ranks after ten steps."""
        flat = self._one_process(OPTIMIZER)
        with self._ranks(backend) as ranks:
            for step in range(10):
                for engine in (flat, ranks):
                    engine.train_batch(random_batch(step), mean_nll, step)
            return self._largest_difference(ranks, flat)

    def resume(self, before: str, after: str) -> float:
        """Between the next step's loss of a run, and of one that went on from its checkpoint elsewhere."""
        directory, batch = self._place / f"checkpoint-{before}-{after}".replace(":", ""), random_batch(7)
        directory.mkdir()
        with self._ranks(before) as ranks:
            for step in range(3):
                ranks.train_batch(random_batch(step), mean_nll, step)
            ranks.begin_checkpoint(directory)()
            state, expected = ranks.state(), ranks.train_batch(batch, mean_nll, 3)["loss"]
        with self._ranks(after) as ranks:
            ranks.load_checkpoint(directory, state)
            return abs(ranks.train_batch(batch, mean_nll, 3)["loss"] - expected)

    @contextmanager
    def _ranks(self, backend: str, **settings: Any) -> Iterator[RankedEngine]:
        chosen: dict[str, Any] = {"optimizer": OPTIMIZER, "max_tokens_per_mb": MAX_TOKENS, **settings}
        # So many for each that one host has no room for all of them.
        cpus = min(self._host_cpus, 2 * self._host_cpus // Ranks.parse(backend).count)
        actor = ActorConfig(backend=backend, cpus=cpus, **chosen)
        with Cluster(self._scheduler, self._place / "logs", [self._model]) as cluster:
            cluster.reserve(rank_asks(actor))
            self._secret = cluster.processes.secret
            yield RankedEngine(cluster, actor, self._model, total_steps=20, threads=1)

    def _one_process(self, optimizer: OptimizerConfig) -> TrainingEngine:
        return TrainingEngine(open_trainable(self._model), optimizer, total_steps=20, max_tokens_per_mb=MAX_TOKENS)

    def _largest_difference(self, ranks: RankedEngine, flat: TrainingEngine) -> float:
        update = ranks.publish()
        self.hosts |= {shard.source.rpartition(":")[0] for shard in update.shards}
        pairs = WeightReader().read(asyncio.run(self._fetched(update)), flat.model.named_weights())
        return max(float((expected - found).abs().max()) for expected, found in pairs)

    async def _fetched(self, update: WeightUpdate) -> WeightUpdate:
        """As an engine on this host gets it."""

        def dial(source: str) -> Any:
            return connect(source, wire=api_wire(), secret=self._secret)

        own = self._place / "fetched"
        own.mkdir(exist_ok=True)
        return await HostWeights(own, own, dial).fetch(update)


def main() -> None:
    scheduler, place, host_cpus = sys.argv[1:]
    compare = Comparison(SchedulerConfig(**json.loads(scheduler)), Path(place), int(host_cpus))
    found = {
        "gradient": {backend: compare.gradient(backend) for backend in ("fsdp:d2", "fsdp:t2", "fsdp:d2t2")},
        "ten steps": {"fsdp:d2": compare.ten_steps("fsdp:d2")},
        "resume": {
            f"{before} {after}": compare.resume(before, after)
            for before, after in (("fsdp:d2", "fsdp:d1"), ("fsdp:d1", "fsdp:d2"), ("fsdp:d2", "fsdp:d3"))
        },
        "hosts": sorted(compare.hosts),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
