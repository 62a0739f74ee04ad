"""What does the driver itself cost? Processor seconds for each byte, episode and token that pass through it.

Published weights are served to a process that fetches them over TCP, as on another host; results of groups are received
as they come from rollout workers; a batch is prepared, dealt and packed for ranks. All of it is the code of a run,
without a model. `areal simulate` takes its figures for the driver from here (`examples/simulation/h100-7b.yaml`).
"""

import argparse
import asyncio
import json
import mmap
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.engine_api import WeightShard, WeightUpdate
from areal.api.messages import Episode, GroupResult, Row
from areal.config.presets import resolve
from areal.config.training import ActorConfig
from areal.engine.model.published import digest_of
from areal.engine.sharded.messages import Share, rank_wire
from areal.infra.rpc.connect import connect, serve
from areal.infra.rpc.frames import Opener, Sealer
from areal.infra.rpc.host_weights import HostWeights
from areal.infra.rpc.shipping import Shipper
from areal.infra.rpc.wire import api_wire
from areal.trainer.batch import minibatches, rows_of_groups, token_batch, with_advantages
from areal.trainer.ranks import deal
from benchmarks.report import Aim, main

SIZE = 512 << 20
GROUPS, SAMPLES, PROMPT_TOKENS, TOKENS = 16, 8, 256, (512, 4096)
SHARES = 64
REPEATS = 5
SHARD = "model.safetensors"
SHARED_MEMORY = "/dev/shm"
DEADLINE_SECONDS = 300.0


async def fetch(address: str) -> None:
    """What an engine on another host does, in a process of its own; prints what it costs that one."""
    began = time.process_time()
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        host = HostWeights(Path(directory), Path(directory), lambda source: connect(address, wire=api_wire()))
        async with asyncio.timeout(DEADLINE_SECONDS):
            here = await host.fetch(published(Path("of another host")))
        fetched = time.process_time()
        check(Path(here.path) / SHARD)
    print(json.dumps([fetched - began, time.process_time() - fetched]))


def check(path: Path) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as shard:
        digest_of(shard)


def published(directory: Path) -> WeightUpdate:
    return WeightUpdate(1, "", str(directory), (WeightShard(SHARD, SIZE, ""),))


async def weight_seconds(shared: Path) -> tuple[float, float, float]:
    """Of serving a version, of fetching it and of checking it."""
    shipper = Shipper([])
    shipper.published = published(shared)
    (shared / SHARD).write_bytes(bytes(SIZE))
    listener = await serve(
        "tcp:127.0.0.1:0", lambda channel: channel.handlers.update(shipper.handlers), wire=api_wire()
    )
    try:
        began = time.process_time()
        words = ["-m", "benchmarks.driver", "--fetch", listener.address]
        fetching = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(DEADLINE_SECONDS):
            printed, _ = await fetching.communicate()
        if fetching.returncode:
            raise RuntimeError(f"the process that fetches ended with {fetching.returncode}; its error is above")
        return time.process_time() - began, *json.loads(printed)
    finally:
        await listener.close()


def group_of(tokens: int, number: int) -> GroupResult:
    length = PROMPT_TOKENS + tokens
    sampled = np.arange(length) >= PROMPT_TOKENS
    draw = np.random.default_rng(number)

    def row() -> Row:
        values = draw.standard_normal(length).astype(np.float32)
        return Row(
            input_ids=draw.integers(0, 50_000, length, dtype=np.int32),
            loss_mask=sampled,
            logprobs=values,
            versions=np.where(sampled, 1, -1).astype(np.int32),
            returns=np.full(length, values[0]),
            completion_index=np.where(sampled, 0, -1).astype(np.int32),
            temperatures=np.ones(length, np.float32),
            reward=float(values[0]),
        )

    episodes = [Episode([row()], 1.0, [{"role": "assistant", "content": "text " * tokens}]) for _ in range(SAMPLES)]
    return GroupResult(number, episodes, [], {1: "digest"})


def receiving_seconds(groups: list[GroupResult]) -> float:
    """From the bytes on the connection to the groups that the pipeline gets."""
    wire, sealer, opener = api_wire(), Sealer(bytes(32)), Opener(bytes(32))
    frames = [sealer.seal(wire.pack(group)) for group in groups]
    began = time.process_time()
    for frame in frames:
        for content in opener.feed(frame):
            wire.unpack(content)
    return time.process_time() - began


def dealing_seconds(groups: list[GroupResult]) -> float:
    """From a batch of groups to a sealed message for each rank."""
    wire, sealer = rank_wire(), Sealer(bytes(32))
    began = time.process_time()
    algorithm = resolve(ActorConfig()).algorithm
    (batch,) = minibatches(with_advantages(token_batch(rows_of_groups(groups)), algorithm, 512), 1, "", algorithm)
    for share in deal(batch, SHARES):
        sealer.seal(wire.pack(Share.of(share.batch)))
    return time.process_time() - began


def per_episode_and_token(seconds: dict[int, float]) -> tuple[float, float]:
    """From what batches of short and of long episodes cost: a line through both."""
    short, long = TOKENS
    episodes = GROUPS * SAMPLES
    token = max(0.0, (seconds[long] - seconds[short]) / episodes / (long - short))
    return max(0.0, seconds[short] / episodes - token * short), token


def run() -> tuple[dict[str, Any], list[Aim]]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
        versions = [asyncio.run(weight_seconds(Path(shared))) for _ in range(REPEATS)]
    batches = {tokens: [group_of(tokens, number) for number in range(GROUPS)] for tokens in TOKENS}
    names = ("serve_byte_seconds", "fetch_byte_seconds", "check_byte_seconds")
    figures = {name: min(each) / SIZE for name, each in zip(names, zip(*versions, strict=True), strict=True)}
    for name, measure in (("receive", receiving_seconds), ("deal", dealing_seconds)):
        best = {tokens: min(measure(groups) for _ in range(REPEATS)) for tokens, groups in batches.items()}
        figures[f"{name}_episode_seconds"], figures[f"{name}_token_seconds"] = per_episode_and_token(best)
    for name, value in figures.items():
        print(f"{name}: {value:.3g}", file=sys.stderr)
    return figures, []


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fetch"]:
        asyncio.run(fetch(sys.argv[2]))
    else:
        main(__doc__ or "", run, argparse.ArgumentParser(description=__doc__))
