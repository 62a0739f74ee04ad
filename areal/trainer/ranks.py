"""The ranks that train one model together, as the driver sees them: `actor.backend: fsdp:d4t2`.

`RankedEngine` does what `TrainingEngine` does in one process, with a share of every batch for each data-parallel rank.
The reference and the critic, if there are any, live on the same ranks.
The ranks live and die together: a process group cannot be joined again. When one of them ends, all do, and the run
goes on from its newest checkpoint (run.py).
"""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ArealError, NonFiniteUpdate
from areal.api.messages import RANK_ROLE, Array
from areal.config.parallel import Ranks
from areal.config.training import ActorConfig, OptimizerConfig
from areal.engine.model.published import whole_digest
from areal.engine.sharded.messages import FrozenRole, RankSetup, Role, Share, TrainedRole, rank_wire
from areal.engine.sharded.trainable import require_trainable
from areal.engine.training.engine import Loss, TokenBatch, learning_rate
from areal.engine.training.figures import Figures
from areal.infra.rpc.channel import Channel, ChannelClosed
from areal.infra.scheduler import Ask, Placement
from areal.trainer.cluster import Cluster
from areal.trainer.processes import Processes, ask
from areal.utils import waits

START_SECONDS = 120.0
CALL_SECONDS = 3600.0
"""A large model takes its time to be read, and a long batch to be computed."""
DEATH_SECONDS = 15.0
"""Ranks notice at once that one of them is gone, and fail; that it has died is known later, from another host last."""
VERBS = {
    "open_store": "open the place where they meet",
    "set_up": "meet",
    "open_model": "read the model",
    "open_frozen": "read a model that is not trained",
    "close_frozen": "drop a model that is not trained",
    "load_adapter": "read the adapter",
    "scores": "compute log-probs or values",
    "train_batch": "compute an update",
    "publish": "write the new weights",
    "begin_checkpoint": "begin a checkpoint",
    "finish_checkpoint": "write a checkpoint",
}
"""What ranks do when they are called, for people."""
UNEVEN_SHARE = 1.1
"""Whole groups are dealt while the largest share has at most this much of the mean; else single sequences are."""


def rank_asks(actor: ActorConfig) -> list[Ask]:
    """What each rank needs of its host. Ranks that compute each matrix product together are neighbours."""
    count = Ranks.parse(actor.backend).count
    return [replace(ask(_name(rank), actor, actor.gpus), together=RANK_ROLE) for rank in range(count)]


def _name(rank: int) -> str:
    return f"{RANK_ROLE} {rank}"


class RankPlace:
    """A `ProcessPlace` of the run."""

    role = RANK_ROLE

    def __init__(self, rank: int, ask: Ask, threads: int, processes: Processes) -> None:
        self._rank = rank
        self.ask: Ask | None = ask
        self._threads = threads
        self._processes = processes
        self._channel: Channel | None = None

    @property
    def name(self) -> str:
        return _name(self._rank)

    async def start(self) -> Placement:
        env = {"OMP_NUM_THREADS": str(self._threads)}
        return await self._processes.spawn(self.name, ["areal.engine.sharded.rank", str(self._rank)], env)

    async def join(self, placement: Placement) -> None:
        arrival = await self._processes.expect(RANK_ROLE, self._rank, placement, timeout_seconds=START_SECONDS)
        self._channel = arrival.channel
        self._processes.count_cpu(self.name, arrival.channel)

    async def call(self, method: str, *arguments: Any, timeout_seconds: float) -> Any:
        if self._channel is None:
            raise ChannelClosed(f"{self.name} has ended")
        return await self._channel.call(method, *arguments, timeout_seconds=timeout_seconds)

    def leave(self) -> None:
        self._channel = None

    def retire(self) -> bool:
        return False


@dataclass(frozen=True)
class DealtShare:
    batch: TokenBatch
    places: Tensor
    """Of its trained tokens among those of the whole batch."""


def deal(batch: TokenBatch, shares: int) -> list[DealtShare]:
    """A batch in parts of about as many tokens each.

    Sequences of one group have prefixes in common, so groups stay together unless that is too uneven.
    """
    groups: dict[int, list[int]] = {}
    for number, span in enumerate(batch.spans):
        groups.setdefault(span.group, []).append(number)
    sizes = [int(span.asked[-1]) if len(span.asked) else 0 for span in batch.spans]
    dealt = _longest_first(list(groups.values()), sizes, shares)
    loads = [sum(sizes[number] for number in share) for share in dealt]
    if max(loads) > UNEVEN_SHARE * sum(loads) / shares:
        dealt = _longest_first([[number] for number in range(len(sizes))], sizes, shares)
    ends = np.cumsum([0, *(len(span.asked) for span in batch.spans)])
    return [_share(batch, sorted(numbers), ends) for numbers in dealt]


def _share(batch: TokenBatch, numbers: list[int], ends: Array) -> DealtShare:
    tokens = [np.arange(ends[number], ends[number + 1]) for number in numbers]
    places = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *tokens]))
    fields = {name: values[places] for name, values in batch.fields.items()}
    return DealtShare(
        TokenBatch([batch.spans[number] for number in numbers], batch.temperatures[places], fields, sets=batch.sets),
        places,
    )


def _longest_first(parts: Sequence[list[int]], sizes: Sequence[int], shares: int) -> list[list[int]]:
    dealt: list[list[int]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for part in sorted(parts, key=lambda part: -sum(sizes[number] for number in part)):
        least = loads.index(min(loads))
        dealt[least] += part
        loads[least] += sum(sizes[number] for number in part)
    return dealt


class RankedModel:
    """A model that the ranks train: `Trained`, as `TrainingEngine` in one process. The driver deals each batch."""

    def __init__(
        self,
        processes: "_RankProcesses",
        role: TrainedRole,
        model: Path,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
    ) -> None:
        self.version = 0
        self._processes = processes
        self._role = role
        self._optimizer = optimizer
        self._total_steps = total_steps
        self._steps = 0
        self._open(model, with_optimizer=False)

    def values(self, batch: TokenBatch) -> Tensor:
        """What a critic expects before every trained token [N]."""
        return self._processes.scores(self._role, batch)

    def train_batch(
        self,
        batch: TokenBatch,
        loss: Loss,
        place: int | None = None,
        *,
        scores: Tensor | None = None,
        entropies: Tensor | None = None,
    ) -> Figures:
        """One optimizer step, or none for an empty batch, as `TrainingEngine.train_batch`."""
        self._steps = self._steps if place is None else place
        figures = Figures(
            mean={"loss": 0.0, "lr": learning_rate(self._optimizer, self._steps, self._total_steps)},
            total={"forward_tokens": 0},
        )
        norm = 0.0
        if batch.spans:
            shares = self._processes.deal(batch)
            packed = [rank_wire().pack(Share.of(share.batch, loss, self._steps)) for share in shares]
            answers = self._processes.of_shares("train_batch", self._role, packed)
            figures = Figures.of_passes([figures, *(Figures(**answer[0]) for answer in answers)])
            norm = answers[0][1]
            for share, (_, _, *found) in zip(shares, answers, strict=True):
                for wanted, values in zip((scores, entropies), found, strict=True):
                    if wanted is not None:
                        wanted[share.places] = torch.from_numpy(values)
        self._steps += 1
        return Figures.of_passes([figures, Figures(mean={"grad_norm": norm})])

    def begin_checkpoint(self, directory: Path) -> Callable[[], None]:
        """Copies are taken now, and written while training goes on; what is returned waits for the end of that."""
        self._processes.all("begin_checkpoint", self._role, str(directory))
        return lambda: self._finish_checkpoint()

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "steps": self._steps}

    def load_checkpoint(self, directory: Path, state: dict[str, Any]) -> None:
        """Take the model and the optimizer of a checkpoint, whatever number of ranks has written it."""
        if "optimizer" in state:
            raise ArealError(
                f"{directory} was written by one process of an older version, whose optimizer ranks cannot read; leave "
                "actor.backend unset until the next checkpoint"
            )
        self._open(directory, with_optimizer=True)
        self.version, self._steps = state["version"], state["steps"]

    def _open(self, directory: Path, *, with_optimizer: bool) -> None:
        self._processes.all("open_model", self._role, str(directory), with_optimizer, pickle.dumps(self._optimizer))

    def _finish_checkpoint(self) -> None:
        self._processes.all("finish_checkpoint", self._role)


class RankedEngine(RankedModel):
    """Implements `Learner` on ranks in processes of their own."""

    def __init__(
        self,
        cluster: Cluster,
        actor: ActorConfig,
        model: Path,
        *,
        total_steps: int,
        threads: int,
        value_head: bool = False,
        seed: int = 1,
    ) -> None:
        """Start the ranks and read the model; places for `rank_asks` are reserved. `seed`: of a new adapter.

        With a value head it gives values, and nothing can be published.
        """
        require_trainable(model, Ranks.parse(actor.backend))
        self._adapts = actor.lora.rank is not None
        processes = _RankProcesses(cluster, actor, total_steps=total_steps, threads=threads, seed=seed)
        role: TrainedRole = "critic" if value_head else "actor"
        super().__init__(processes, role, model, actor.optimizer, total_steps=total_steps)

    def load_checkpoint(self, directory: Path, state: dict[str, Any]) -> None:
        """An adapter's model stays as it is."""
        if not self._adapts:
            super().load_checkpoint(directory, state)
            return
        self._processes.all("load_adapter", str(directory))
        self.version, self._steps = state["version"], state["steps"]

    def without_adapter(self, role: FrozenRole) -> "RankedFrozen":
        """The model that is adapted, as it was before."""
        return RankedFrozen(self._processes, role)

    def open_frozen(self, role: FrozenRole, model: Path, *, offload: bool = False) -> "RankedFrozen":
        """A model on the same ranks that is not trained; `offload` as `actor.offload`."""
        require_trainable(model, self._processes.ranks)
        self._processes.all("open_frozen", role, str(model), offload)
        return RankedFrozen(self._processes, role)

    def close_frozen(self, role: FrozenRole) -> None:
        self._processes.all("close_frozen", role)

    def open_critic(self, model: Path, optimizer: OptimizerConfig) -> RankedModel:
        """A value model on the same ranks."""
        require_trainable(model, self._processes.ranks)
        return RankedModel(self._processes, "critic", model, optimizer, total_steps=self._total_steps)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probability of every trained token [N] under the present weights."""
        return self._processes.scores(self._role, batch)

    def publish(self, dtype: str = "float32") -> WeightUpdate:
        """Each rank writes its part of the weights into the shared memory of its host as the present version."""
        parts: list[WeightUpdate] = self._processes.all("publish", self.version, dtype)
        (place,) = {part.path for part in parts}
        shards = sorted((shard for part in parts for shard in part.shards), key=lambda shard: shard.name)
        return WeightUpdate(self.version, whole_digest(shards), place, tuple(shards), parts[0].layout)

    def close(self) -> None:
        """The ranks end with their cluster."""


class RankedFrozen:
    """A frozen model on the same ranks."""

    def __init__(self, processes: "_RankProcesses", role: FrozenRole) -> None:
        self._processes = processes
        self._role = role

    def logprobs(self, batch: TokenBatch) -> Tensor:
        return self._processes.scores(self._role, batch)


class _RankProcesses:
    """The ranks themselves, which are called together or not at all."""

    def __init__(self, cluster: Cluster, actor: ActorConfig, *, total_steps: int, threads: int, seed: int) -> None:
        self._cluster = cluster
        self.ranks = Ranks.parse(actor.backend)
        self._broken: Exception | None = None
        """Why the ranks cannot be called any more."""
        self._places = [RankPlace(rank, each, threads, cluster.processes) for rank, each in enumerate(rank_asks(actor))]
        cluster.wait(cluster.processes.start(self._places, never_again=[RANK_ROLE]))
        (store,) = self._call("open_store", [(self.ranks.count,)], START_SECONDS)
        setups = [
            RankSetup(rank, self.ranks, actor, total_steps, threads, tuple(store), seed)
            for rank in range(self.ranks.count)
        ]
        self._call("set_up", [(pickle.dumps(setup),) for setup in setups], START_SECONDS)

    def deal(self, batch: TokenBatch) -> list[DealtShare]:
        return deal(batch, self.ranks.data)

    def scores(self, role: Role, batch: TokenBatch) -> Tensor:
        """One number for every trained token [N] from the model of this role."""
        shares = self.deal(batch)
        out = torch.empty(len(batch.temperatures))
        packed = [rank_wire().pack(Share.of(share.batch)) for share in shares]
        for share, found in zip(shares, self.of_shares("scores", role, packed), strict=True):
            out[share.places] = torch.from_numpy(found)
        return out

    def all(self, method: str, *arguments: Any) -> list[Any]:
        return self._call(method, [arguments] * self.ranks.count, CALL_SECONDS)

    def of_shares(self, method: str, role: Role, packed: Sequence[bytes]) -> list[Any]:
        """Every tensor-parallel rank gets the share of its group; one answer of each group."""
        arguments = [(role, share) for share in packed for _ in range(self.ranks.tensor)]
        return self._call(method, arguments, CALL_SECONDS)[:: self.ranks.tensor]

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """Call as many ranks as there are arguments, all at once. Raises RanksLost if one of them has died."""
        if self._broken is not None:
            raise self._broken
        try:
            return self._cluster.wait(self._gather(method, arguments, seconds), DEATH_SECONDS)
        except NonFiniteUpdate:
            raise
        except Exception as error:  # the other ranks may wait for the one that raised it
            self._broken = error
            raise

    async def _gather(self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        calls = [
            asyncio.ensure_future(place.call(method, *each, timeout_seconds=seconds))
            for place, each in zip(self._places, arguments, strict=False)
        ]

        def describe() -> str:
            missing = [str(rank) for rank, call in enumerate(calls) if not call.done()]
            who = "all ranks" if len(missing) == len(calls) else f"rank {' and '.join(missing)}"
            return f"waits for {who} to {VERBS.get(method, method)}"

        try:
            with waits.current().entered(describe, seconds):
                return await asyncio.gather(*calls)
        except NonFiniteUpdate:  # all of them raise it, and go on
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        finally:
            for call in calls:
                call.cancel()
