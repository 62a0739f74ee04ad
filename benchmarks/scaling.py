"""How does cost grow? Processor seconds over context length, turns, group size, concurrent episodes and model size.

Each sweep doubles one quantity and fits cost = c * quantity ** exponent. Engine, proxy and training step are the real
ones, in this process, on random weights of the built-in model's shape with longer positions; answers have a fixed
length. There is no peer: an exponent of 1 means that twice as much costs twice as much.
"""

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.config.training import OptimizerConfig
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.model.architecture import Architecture, read_architecture
from areal.engine.model.decoder import Decoder, initialise, parameter_count
from areal.engine.models import find_model
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.engine.training.figures import Figures
from areal.engine.training.packing import Span
from areal.proxy import Proxy, ProxyLimits
from areal.utils.hf_utils import load_hf_tokenizer
from benchmarks.report import Aim, main

ANSWER_TOKENS = 16
MAX_POSITIONS = 32768
LINEAR = 1.1
WORDS = "the quick brown fox jumps over the lazy dog and asks for 12 more numbers to be added up "


def exponent(costs: dict[int, float]) -> float:
    """Slope of log cost over log size, by least squares."""
    slope, _ = np.polyfit([math.log(size) for size in costs], [math.log(cost) for cost in costs.values()], 1)
    return float(slope)


def architecture(**changes: Any) -> Architecture:
    from dataclasses import replace

    return replace(read_architecture(find_model("builtin:tiny-math")), max_positions=MAX_POSITIONS, **changes)


def engine_of(shape: Architecture) -> EmbeddedEngine:
    decoder = Decoder(shape)
    initialise(decoder, torch.Generator().manual_seed(0))
    return EmbeddedEngine(DecoderRunner(decoder), max_running=2048)


async def generate(engine: EmbeddedEngine, prompts: list[list[int]]) -> None:
    gconfig = GenerationHyperparameters(max_new_tokens=ANSWER_TOKENS)
    await asyncio.gather(*(engine.agenerate(ModelRequest(str(i), ids, gconfig)) for i, ids in enumerate(prompts)))


def prompt(seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 256, length).tolist()
    return ids


async def sweep(
    name: str, sizes: tuple[int, ...], work: Callable[[int], Awaitable[None]], repeats: int = 2
) -> dict[str, Any]:
    """The least processor time of a few tries for each size, after a warm-up with the smallest."""
    await work(sizes[0])
    costs = {}
    for size in sizes:
        tries = []
        for _ in range(repeats):
            began = time.process_time()
            await work(size)
            tries.append(time.process_time() - began)
        costs[size] = min(tries)
    figures = {"cpu_seconds": costs, "exponent": exponent(costs)}
    print(f"{name}: exponent {figures['exponent']:.2f}, {costs}", file=sys.stderr)
    return figures


async def context_length() -> dict[str, Any]:
    async def work(length: int) -> None:
        engine = engine_of(architecture())  # a new one, so that nothing is cached
        await generate(engine, [prompt(0, length)])
        await engine.aclose()

    return await sweep("context length", (512, 1024, 2048, 4096, 8192), work)


async def group_size() -> dict[str, Any]:
    async def work(count: int) -> None:
        engine = engine_of(architecture())
        await generate(engine, [prompt(0, 512)] * count)
        await engine.aclose()

    return await sweep("group size", (8, 16, 32, 64, 128), work)


async def train_group_size() -> dict[str, Any]:
    engine = TrainingEngine(architecture(), OptimizerConfig(), total_steps=1000)
    initialise(engine.decoder, torch.Generator().manual_seed(0))

    async def work(count: int) -> None:
        shared = np.array(prompt(0, 512))
        spans = [Span(np.r_[shared, prompt(i, ANSWER_TOKENS)], np.arange(512, 528), 0) for i in range(count)]
        total = count * ANSWER_TOKENS
        engine.train_batch(TokenBatch(spans, torch.ones(total)), lambda logprobs, fields: (-logprobs.mean(), Figures()))

    return await sweep("group size, training step", (8, 16, 32, 64, 128), work)


async def through_proxy(work: Callable[[Proxy], Awaitable[None]]) -> None:
    engine = engine_of(architecture())
    proxy = Proxy(
        engine,
        load_hf_tokenizer(find_model("builtin:tiny-math")),
        gconfig=GenerationHyperparameters(max_new_tokens=ANSWER_TOKENS),
        max_positions=MAX_POSITIONS,
        limits=ProxyLimits(max_sessions=20_000),
    )
    await proxy.start()
    await work(proxy)
    await proxy.aclose()
    await engine.aclose()


async def talk(proxy: Proxy, number: int, turns: int) -> None:
    """A conversation of that many turns in a session of its own."""
    session = proxy.open_session()
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{number} {turn} {WORDS}"})
        answer = await proxy.http_client.post(
            f"{session.base_url}/chat/completions",
            json={"model": "default", "messages": messages},
            headers={"authorization": f"Bearer {session.api_key}"},
        )
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    await proxy.end_session(session)


async def turns() -> dict[str, Any]:
    async def work(count: int) -> None:
        await through_proxy(lambda proxy: talk(proxy, 0, count))

    return await sweep("turns per episode", (8, 16, 32, 64), work)


async def concurrent_episodes() -> dict[str, Any]:
    async def work(count: int) -> None:
        async def all_of_them(proxy: Proxy) -> None:
            await asyncio.gather(*(talk(proxy, number, 1) for number in range(count)))

        await through_proxy(all_of_them)

    return await sweep("concurrent episodes", (32, 64, 128, 256, 512, 1024), work)


async def model_size() -> dict[str, Any]:
    shapes = {
        parameter_count(shape): shape
        for shape in (
            architecture(hidden_size=width, intermediate_size=3 * width, num_layers=layers)
            for width, layers in ((96, 2), (192, 4), (384, 6), (768, 8))
        )
    }

    async def work(parameters: int) -> None:
        engine = engine_of(shapes[parameters])
        await generate(engine, [prompt(i, 64) for i in range(16)])
        await engine.aclose()

    return await sweep("model size (parameters)", tuple(shapes), work)


async def measure() -> dict[str, Any]:
    return {
        "context_length": await context_length(),
        "turns": await turns(),
        "group_size": await group_size(),
        "train_group_size": await train_group_size(),
        "concurrent_episodes": await concurrent_episodes(),
        "model_size": await model_size(),
    }


def run() -> tuple[dict[str, Any], list[Aim]]:
    torch.set_num_threads(1)
    figures = asyncio.run(measure())
    bounded = ("turns", "group_size", "train_group_size", "concurrent_episodes")
    aims = [
        Aim.at_most(f"exponent of the cost in {name.replace('_', ' ')}", figures[name]["exponent"], LINEAR)
        for name in bounded
    ]
    return figures, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
