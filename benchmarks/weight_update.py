"""How long do new weights take to reach an engine, and for how long do they hold up its answers?

A model of 135M parameters answers without a pause while versions are published. Each has three parts: the trainer
writes and hashes it, the engine fetches and checks it while it goes on generating (`stage`), and running requests wait
(`pause`): for the swap, in which nothing is computed, and then until their tokens so far have been computed again under
the new weights, which vLLM leaves out. "Same host" maps the trainer's shared memory; "other host" is an engine in a
mount namespace with a shared memory of its own, which fetches the shards over TCP. Every token must come from a version
that was published, with its digest, and versions never go back.
"""

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areal.api.engine_api import WeightUpdate
from areal.api.errors import EngineError
from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters, RolloutConfig
from areal.config.training import SchedulerConfig
from areal.engine.inference.group import EngineConnections, EngineGroup
from areal.engine.model.published import WeightWriter
from areal.engine.models import find_model, open_trainable
from areal.infra.rpc.shipping import Shipper
from areal.infra.rpc.sockets import address_towards
from areal.infra.scheduler import LAUNCHERS
from areal.infra.scheduler.base import Ask, KeeperStart, Launched
from areal.infra.scheduler.local import LocalLauncher
from areal.trainer.engines import Engines
from areal.trainer.processes import Processes
from benchmarks.engine import vllm_python
from benchmarks.report import Aim, main
from benchmarks.smollm2 import smollm2

VERSIONS = 8
REQUESTS = 4
START_SECONDS = 900.0
PROMPT_TOKENS, ANSWER_TOKENS = 64, 64
PAUSE_AIMS = {"embedded": 0.1, "vllm": 1.0}
"""Seconds, by the kind of engine."""
APART = [
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "sh",
    "-c",
    'mount -t tmpfs tmpfs /dev/shm && exec "$@"',
    "sh",
]
"""A mount namespace with a shared memory of its own; needs root."""
OUTSIDE = "192.0.2.1"
"""An address for documentation: the way to it leaves by the interface that other hosts are reached through."""


class ApartLauncher(LocalLauncher):
    """Keepers on this machine that see nothing of the driver's shared memory."""

    async def launch(self, ask: Ask, keeper: KeeperStart) -> Launched:
        return await super().launch(ask, replace(keeper, argv=[*APART, *keeper.argv]))


@dataclass
class Times:
    """Seconds of each version."""

    write: list[float] = field(default_factory=list)
    stage: list[float] = field(default_factory=list)
    swap: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    tokens: int = 0
    wrong: int = 0
    """Tokens under a version that was not published, with other weights than published, or after a newer one."""

    def summary(self) -> dict[str, Any]:
        medians = {f"{name}_seconds": _median(getattr(self, name)) for name in ("write", "stage", "swap", "pause")}
        return {
            **medians,
            "pause_seconds_most": max(self.pause, default=None),
            "tokens": self.tokens,
            "wrong": self.wrong,
        }


@asynccontextmanager
async def engine_of(model: Path, backend: str, python: str, apart: bool, logs: Path) -> AsyncIterator[Any]:
    """The processes of a run with one engine, and a worker's way to it."""
    shipper, failures = Shipper([model]), list[Exception]()
    config = SchedulerConfig(heartbeat_seconds=None)
    if apart:
        config = replace(config, type="apart", address=address_towards(OUTSIDE))  # type: ignore[arg-type]

    def fail(error: Exception) -> None:
        failures.append(error)
        engines.give_up()  # otherwise the benchmark would wait for an engine that does not come back

    processes = Processes(config, logs, fail, shipper.handlers)
    group = EngineGroup()
    connections = EngineConnections(group, processes.secret)
    rollout = RolloutConfig(
        backend=backend, python=python, engine_args=["--enforce-eager"] if backend == "vllm" else []
    )
    engines = Engines.of(rollout, model, processes, lambda serving: None, threads=2)
    try:
        async with asyncio.timeout(START_SECONDS):
            await processes.start(engines.members)
            await connections.follow(engines.serving)
        try:
            yield engines, group, shipper, processes.shared_memory
        except EngineError as error:
            raise (failures or [error])[0] from None
    finally:
        await group.aclose()
        await engines.close()
        await processes.close()


async def measure(model: Path, backend: str, python: str, apart: bool, versions: int) -> Times:
    times, published = Times(), dict[int, str]()
    weights = open_trainable(model)
    with tempfile.TemporaryDirectory() as logs:
        async with engine_of(model, backend, python, apart, Path(logs)) as (engines, group, shipper, shared):
            writer = WeightWriter(shared, weights.named_weights())

            async def publish(version: int) -> None:
                began = time.monotonic()
                update: WeightUpdate = await asyncio.to_thread(writer.write, version)
                wrote = time.monotonic()
                shipper.published = update
                published[version] = update.digest
                await engines.group.stage_weights(update)
                staged = time.monotonic()
                await engines.group.update_weights(update)
                times.write.append(wrote - began)
                times.stage.append(staged - wrote)

            await publish(1)
            await engines.pauses()
            await engines.swaps()
            load = [asyncio.ensure_future(_ask_on(group, number, published, times)) for number in range(REQUESTS)]
            for version in range(2, versions + 2):
                await asyncio.sleep(1.0)  # requests are in the middle of their answers
                with torch.no_grad():
                    weights.flat.mul_(1.0001)
                await publish(version)
            await asyncio.sleep(1.0)
            times.pause, times.swap = await engines.pauses(), await engines.swaps()
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    return times


async def _ask_on(group: EngineGroup, number: int, published: dict[int, str], times: Times) -> None:
    """One answer after the other; every token is looked at when it arrives: the last answers are not waited for."""
    gconfig = GenerationHyperparameters(max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS)
    call = 0
    while True:
        call += 1
        prompt = [(number * 131 + call * 17 + place) % 200 + 5 for place in range(PROMPT_TOKENS)]
        newest = 0
        async with aclosing(group.astream(ModelRequest(f"{number}-{call}", prompt, gconfig))) as chunks:
            async for chunk in chunks:
                times.tokens += len(chunk.versions)
                for version in chunk.versions:
                    times.wrong += chunk.digests.get(version) != published.get(version, "") or version < newest
                    newest = version


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Aim]]:
    LAUNCHERS["apart"] = lambda config: ApartLauncher()
    model = find_model("builtin:tiny-math") if arguments.tiny else smollm2()
    backend: str = arguments.backend
    python = str(vllm_python()) if backend == "vllm" else ""
    figures: dict[str, Any] = {"model": model.name, "backend": backend, "versions": arguments.versions}
    aims: list[Aim] = []
    for where, apart in (("same host", False), ("other host", True)):
        print(f"{backend}, {where} …", file=sys.stderr, flush=True)
        times = asyncio.run(measure(model, backend, python, apart, arguments.versions))
        figures[where] = times.summary()
        pause = _median(times.pause)
        aims.append(Aim.at_least(f"{where}: pauses that were measured", len(times.pause), 1))
        aims.append(
            Aim.at_most(f"{where}: median pause in seconds", math.inf if pause is None else pause, PAUSE_AIMS[backend])
        )
        swap = _median(times.swap)
        aims.append(
            Aim.at_most(
                f"{where}: median seconds in which nothing is computed",
                math.inf if swap is None else swap,
                PAUSE_AIMS[backend],
            )
        )
        aims.append(Aim.at_least(f"{where}: tokens that were looked at", times.tokens, 1))
        aims.append(Aim.at_most(f"{where}: tokens under a wrong version", times.wrong, 0))
    return figures, aims


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", default="embedded", choices=PAUSE_AIMS, help="the kind of engine")
    parser.add_argument("--versions", type=int, default=VERSIONS, help="how many are published")
    parser.add_argument("--tiny", action="store_true", help="the built-in model instead of 135M parameters")
    options, _ = parser.parse_known_args()
    main(__doc__ or "", partial(run, options), parser)
