"""One rank of a model that is trained on several: `python -m areal.engine.sharded.rank INDEX`.

It connects to the driver, meets the other ranks at the address that rank 0 has opened, and then does what the driver
asks of all of them, one thing after the other. A rank whose driver is gone, or that the others wait for in vain, ends.
"""

import asyncio
import fcntl
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ModelError
from areal.api.messages import RANK_ROLE, Doing
from areal.config.training import OptimizerConfig
from areal.engine.model.device import CPU, find_device
from areal.engine.models import portable_name
from areal.engine.sharded.adapter import AdapterLearner, RankAdapterWriter
from areal.engine.sharded.checkpoint import CheckpointWriter, load_optimizer
from areal.engine.sharded.export import RankWeightWriter
from areal.engine.sharded.learner import RankLearner
from areal.engine.sharded.messages import FrozenRole, RankSetup, Role, Share, TrainedRole, rank_wire
from areal.engine.sharded.model import ShardedModel
from areal.engine.sharded.packed_attention import find_kernel
from areal.infra.rpc.channel import Handler
from areal.infra.rpc.connect import connect_to_driver, own_address, read_secret, serve
from areal.infra.rpc.shipping import Shipper, is_here, shared
from areal.infra.rpc.status import start_answering
from areal.infra.rpc.wire import api_wire
from areal.infra.status import line_of_thread, of_wait
from areal.utils.waits import Waits

COLLECTIVE_SECONDS = 600.0
"""How long a rank waits for the others. The driver ends all of them as soon as one has died; this is for the rest."""
LOOPBACK = "127.0.0.1"
THREAD_NAME = "rank"
PUBLISHED = "published"
"""The directory of the weights, in the one that the processes of the run on a host have together."""
_SIOCGIFADDR = 0x8915


class Rank:
    """What the driver may call, always of all ranks; one call after the other, in a thread."""

    def __init__(self, shipper: Shipper, address: str) -> None:
        """`shipper` serves at `address` what was published last; empty = nowhere, there is one host."""
        self._shipper = shipper
        self._address = address
        self._thread = ThreadPoolExecutor(1, THREAD_NAME)
        self._waits = Waits()
        self._store: dist.TCPStore | None = None
        self._setup: RankSetup | None = None
        self._device = CPU
        self._learners: dict[TrainedRole, RankLearner] = {}
        self._frozen: dict[FrozenRole, ShardedModel] = {}
        self._writer: RankWeightWriter | RankAdapterWriter | None = None
        self._checkpoints: dict[TrainedRole, CheckpointWriter] = {}

    @property
    def handlers(self) -> dict[str, Handler]:
        def in_thread(function: Callable[..., Any]) -> Handler:
            async def call(*arguments: Any) -> Any:
                with self._waits.entered(f"is in {function.__name__}", where=self._line):
                    return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

            return call

        collective = (
            self.open_store,
            self.set_up,
            self.open_model,
            self.open_frozen,
            self.close_frozen,
            self.load_adapter,
            self.scores,
            self.train_batch,
            self.publish,
            self.begin_checkpoint,
        )
        return {each.__name__: in_thread(each) for each in collective} | {
            "finish_checkpoint": self.finish_checkpoint,
            "cpu_seconds": time.process_time,
        }

    async def doing(self) -> list[Doing]:
        return [of_wait("it", wait) for wait in self._waits.now()[:1]]

    def _line(self) -> str:
        """That its thread is at."""
        named = (each.ident or 0 for each in threading.enumerate() if each.name.startswith(THREAD_NAME))
        return next((line_of_thread(each) for each in named), "")

    def open_store(self, count: int) -> tuple[str, int]:
        """Rank 0 alone: where the others meet it."""
        host = own_address() or LOOPBACK
        listening = socket.create_server((host, 0))
        port: int = listening.getsockname()[1]
        self._store = dist.TCPStore(
            host, port, count, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return host, port

    def set_up(self, packed: bytes) -> None:
        """Meet the others."""
        setup: RankSetup = pickle.loads(packed)
        self._setup = setup
        torch.set_num_threads(setup.threads)
        os.environ["GLOO_SOCKET_IFNAME"] = _interface_of(own_address() or LOOPBACK)
        store = self._store or dist.TCPStore(*setup.store, setup.ranks.count, is_master=False, wait_for_workers=False)
        self._device = device = own_device(setup.actor.device, _before_on_this_host(store, setup))
        # transformers takes the device of this number.
        numbers = {"RANK": setup.rank, "WORLD_SIZE": setup.ranks.count, "LOCAL_RANK": device.index or 0}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        dist.init_process_group(
            "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
            store=store,
            rank=setup.rank,
            world_size=setup.ranks.count,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )

    def open_model(self, role: TrainedRole, directory: str, with_optimizer: bool, packed_optimizer: bytes) -> None:
        """Read a model, or a checkpoint with the optimizer's moments, in place of what was open in its role."""
        setup = self._known_setup
        optimizer: OptimizerConfig = pickle.loads(packed_optimizer)
        self._learners.pop(role, None)
        if role == "actor":
            self._writer = None
        sizes = {"total_steps": setup.total_steps, "max_tokens_per_mb": setup.actor.max_tokens_per_mb}
        if role == "actor" and setup.actor.lora.rank is not None:
            model = self._opened(directory, trainable=False, checkpointing=setup.actor.gradient_checkpointing)
            name = portable_name(setup.actor.path, Path(directory))
            learner: RankLearner = AdapterLearner.open(
                model, setup.actor.lora, setup.ranks, optimizer, seed=setup.seed, base_name=name, **sizes
            )
        else:
            model = self._opened(directory, trainable=True, value_head=role == "critic")
            learner = RankLearner(model, setup.ranks, optimizer, **sizes)
        if with_optimizer:
            load_optimizer(learner, Path(directory))
        self._learners[role] = learner
        if role not in self._checkpoints:
            self._checkpoints[role] = CheckpointWriter()

    def open_frozen(self, role: FrozenRole, directory: str, offload: bool) -> None:
        self._frozen[role] = self._opened(directory, trainable=False, offload=offload)

    def close_frozen(self, role: FrozenRole) -> None:
        self._frozen.pop(role, None)  # there is none where the model without its adapter was meant

    def load_adapter(self, directory: str) -> None:
        """Take the adapter of a checkpoint and its moments."""
        learner = self._learners["actor"]
        assert isinstance(learner, AdapterLearner), "an adapter is trained"
        learner.load(Path(directory))

    def scores(self, role: Role, packed: bytes) -> Any:
        share: Share = rank_wire().unpack(packed)
        if role == "reference" or role == "teacher":
            actor = self._learners["actor"]
            if role not in self._frozen:
                assert isinstance(actor, AdapterLearner), "the reference is the model without its adapter"
                return actor.base_scores(share.batch()).numpy()
            return actor.scores(share.batch(), self._frozen[role]).numpy()
        return self._learners[role].scores(share.batch()).numpy()

    def train_batch(self, role: TrainedRole, packed: bytes) -> tuple[dict[str, dict[str, float]], float, Any, Any]:
        share: Share = rank_wire().unpack(packed)
        assert share.loss is not None, "a batch that is trained has a loss"
        figures, norm, scores, entropies = self._learners[role].train_batch(share.batch(), share.loss, share.place)
        return figures.by_kind(), norm, scores.numpy(), entropies.numpy()

    def publish(self, version: int, dtype: str) -> WeightUpdate:
        """Write this rank's files of the weights, in `dtype`; engines of other hosts fetch them from here."""
        if self._writer is None:
            place = shared()
            assert place is not None, "a keeper has started this process"
            actor = self._learners["actor"]
            if isinstance(actor, AdapterLearner):
                self._writer = RankAdapterWriter(actor, place / PUBLISHED, self._address)
            else:
                self._writer = RankWeightWriter(actor.model, place / PUBLISHED, self._address, getattr(torch, dtype))
        self._shipper.published = self._writer.write(version)
        return self._shipper.published

    def begin_checkpoint(self, role: TrainedRole, directory: str) -> None:
        """Returns once copies have been taken."""
        self._checkpoints[role].begin(self._learners[role], Path(directory))

    async def finish_checkpoint(self, role: TrainedRole) -> None:
        """Beside whatever the thread computes."""
        await asyncio.to_thread(self._checkpoints[role].finish)

    def _opened(
        self,
        directory: str,
        *,
        trainable: bool,
        checkpointing: bool = False,
        value_head: bool = False,
        offload: bool = False,
    ) -> ShardedModel:
        setup = self._known_setup
        if not is_here(Path(directory)):
            raise ModelError(
                f"every rank reads its part of the model by itself, and {directory!r} is not on "
                f"{socket.gethostname()}; put it on a file system that all of them share"
            )
        actor, device = setup.actor, self._device
        return ShardedModel(
            Path(directory),
            setup.ranks,
            device,
            dtype=actor.dtype,
            kernel=find_kernel(actor.attention, Path(directory), device, actor.dtype),
            gradient_checkpointing=checkpointing or (trainable and actor.gradient_checkpointing),
            offload=actor.offload or offload,
            trainable=trainable,
            value_head=value_head,
        )

    @property
    def _known_setup(self) -> RankSetup:
        assert self._setup is not None, "set_up comes first"
        return self._setup


def own_device(name: str, before: int) -> torch.device:
    """The device of a rank with `before` others on its host. Those that see several GPUs take one each, in turn."""
    device = find_device(name, "actor.device")
    if device.type == "cuda" and ":" not in name:
        return torch.device("cuda", before % torch.cuda.device_count())
    return device


def _before_on_this_host(store: dist.TCPStore, setup: RankSetup) -> int:
    """How many ranks of lower numbers are on the same host."""
    store.set(f"areal host of {setup.rank}", socket.gethostname())
    hosts = [store.get(f"areal host of {rank}") for rank in range(setup.rank + 1)]
    return hosts[:-1].count(hosts[-1])


def _interface_of(address: str) -> str:
    """The network interface that has an address; gloo listens on one interface, which it would guess otherwise."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise OSError(f"no network interface of {socket.gethostname()} has the address {address}")


async def serve_rank(index: int) -> None:
    """The process's whole life."""
    secret, shipper, host, address = read_secret(), Shipper([]), own_address(), ""
    if host is not None:
        endpoint = await serve(
            f"tcp:{host}:0",
            lambda channel: channel.handlers.update(shipper.handlers),
            wire=api_wire(),
            peer="an engine",
            secret=secret,
        )
        address = endpoint.address
    rank = Rank(shipper, address)
    start_answering(secret, rank.doing)
    driver = await connect_to_driver(RANK_ROLE, index, handlers=rank.handlers, wire=api_wire(), secret=secret)
    await driver.closed
    os._exit(0)  # its thread may wait for other ranks, which have ended as well


if __name__ == "__main__":
    asyncio.run(serve_rank(int(sys.argv[1])))
