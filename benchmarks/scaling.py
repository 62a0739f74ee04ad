"""How does cost grow? Processor seconds over context length, turns, group size, episodes at once and model size.

Each sweep doubles one quantity and fits cost = c * quantity ** exponent. Engine, proxy and training step are the real
ones, in this process, on random weights of the built-in model's shape with longer positions; answers have a fixed
length. There is no peer: an exponent of 1 means that twice as much costs twice as much.

Turns are counted twice. With an engine that costs nothing, what is left is what is done for each call outside of a
model: client, proxy and tree. With the model, attention is added, which for every token reads the whole conversation:
that grows with it whoever computes it. Two more look at what shares a worker: 10,000 agents that wait for their tools,
and one conversation of 32k tokens beside 64 short ones.
"""

import asyncio
import gc
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
from areal.proxy import Proxy, ProxyLimits, Session
from areal.utils.hf_utils import load_hf_tokenizer
from benchmarks.instant import ANSWER, InstantEngine, resident_bytes
from benchmarks.report import Aim, main

ANSWER_TOKENS = 16
MAX_POSITIONS = 32768
LINEAR = 1.1
FLAT = 1.05
"""Of what is done for each turn."""
TURNS = (25, 50, 100, 200)
EARLY, LATE = slice(20, 40), slice(180, 200)
WAITING = (1_250, 2_500, 5_000, 10_000)
WAITING_BYTES = 32 * 2**10
"""Of an agent that waits between two calls: 10,000 of them then take 320 MB, about what the worker's libraries do."""
SHORT_ONES, LONG_TOKENS = 64, 32_000
HELD_UP = 3.0
"""Times as long as alone: two cores are shared with a thread that reads 32k tokens."""
LONG_WORDS_TOKENS = 76
"""Of `WORDS`, about."""
DEADLINE_SECONDS = 300.0
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


async def talk(proxy: Proxy, number: int, turns: int, costs: list[float] | None = None) -> None:
    """A conversation of that many turns in a session of its own; `costs` gets the processor seconds of each."""
    session = proxy.open_session()
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{number} {turn} {WORDS}"})
        began = time.process_time()
        answer = await ask(proxy, session, messages)
        if costs is not None:
            costs.append(time.process_time() - began)
        messages.append({"role": "assistant", "content": answer})
    await proxy.end_session(session)


async def ask(proxy: Proxy, session: Session, messages: list[dict[str, Any]]) -> str:
    answer = await proxy.http_client.post(
        f"{session.base_url}/chat/completions",
        json={"model": "default", "messages": messages},
        headers={"authorization": f"Bearer {session.api_key}"},
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def instantly(work: Callable[[Proxy], Awaitable[None]]) -> None:
    """The same with an engine that costs nothing."""
    tokenizer = load_hf_tokenizer(find_model("builtin:tiny-math"))
    engine = InstantEngine([*tokenizer(ANSWER)["input_ids"], tokenizer.eos_token_id])
    gconfig = GenerationHyperparameters(max_new_tokens=ANSWER_TOKENS)
    limits = ProxyLimits(max_sessions=20_000)
    proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=MAX_POSITIONS, limits=limits)
    await proxy.start()
    await work(proxy)
    await proxy.aclose()


async def turns() -> dict[str, Any]:
    """What is done for each turn, and how much more for a late one; the least of a few conversations."""
    conversations: list[list[float]] = []

    async def work(proxy: Proxy) -> None:
        for number in range(6):
            gc.collect()
            conversations.append([])
            await talk(proxy, number, TURNS[-1], conversations[-1])

    await instantly(work)
    least = np.array(conversations).min(0)
    costs = {count: float(least[:count].sum()) for count in TURNS}
    figures = {
        "cpu_seconds": costs,
        "exponent": exponent(costs),
        "early_us": 1e6 * float(least[EARLY].mean()),
        "late_us": 1e6 * float(least[LATE].mean()),
    }
    figures["late_over_early"] = figures["late_us"] / figures["early_us"]
    print(f"turns without a model: {figures}", file=sys.stderr)
    return figures


async def turns_with_model() -> dict[str, Any]:
    async def work(count: int) -> None:
        await through_proxy(lambda proxy: talk(proxy, 0, count))

    return await sweep("turns with a model", (8, 16, 32, 64), work)


async def waiting_agents() -> dict[str, Any]:
    """Agents that call the model, wait for a tool, and call it again, all at once in one worker."""

    async def measure(count: int, figures: dict[str, Any]) -> None:
        tool_answers = asyncio.Event()
        waiting = asyncio.Semaphore(0)

        async def agent(proxy: Proxy, number: int) -> None:
            session = proxy.open_session()
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"{number} {WORDS}"}]
            messages.append({"role": "assistant", "content": await ask(proxy, session, messages)})
            waiting.release()
            await asyncio.wait_for(tool_answers.wait(), DEADLINE_SECONDS)
            messages.append({"role": "user", "content": f"The tool says {number}."})
            await ask(proxy, session, messages)
            await proxy.end_session(session)

        async def work(proxy: Proxy) -> None:
            await talk(proxy, 0, 2)
            gc.collect()
            memory, began = resident_bytes(), time.process_time()
            agents = [asyncio.ensure_future(agent(proxy, number)) for number in range(count)]
            for _ in agents:
                await asyncio.wait_for(waiting.acquire(), DEADLINE_SECONDS)
            figures.setdefault("bytes_each", {})[count] = (resident_bytes() - memory) / count
            tool_answers.set()
            await asyncio.gather(*agents)
            figures.setdefault("us_each", {})[count] = 1e6 * (time.process_time() - began) / count

        await instantly(work)

    figures: dict[str, Any] = {}
    for count in WAITING:
        await measure(count, figures)
    figures["exponent"] = exponent({count: each * count for count, each in figures["us_each"].items()})
    print(f"waiting agents: {figures}", file=sys.stderr)
    return figures


async def beside_a_long_one() -> dict[str, Any]:
    """Seconds that short calls take, alone and while a conversation of 32k tokens is read; engine of no cost."""
    figures: dict[str, Any] = {}

    async def short_calls(proxy: Proxy) -> list[float]:
        taken = []

        async def one(number: int) -> None:
            session = proxy.open_session()
            for _ in range(8):
                began = time.monotonic()
                await ask(proxy, session, [{"role": "user", "content": f"{number} {WORDS}"}])
                taken.append(time.monotonic() - began)
            await proxy.end_session(session)

        await asyncio.gather(*(one(number) for number in range(SHORT_ONES)))
        return sorted(taken)

    async def work(proxy: Proxy) -> None:
        text = WORDS * (LONG_TOKENS // LONG_WORDS_TOKENS)
        await short_calls(proxy)
        alone = await short_calls(proxy)
        session = proxy.open_session()
        long = asyncio.ensure_future(ask(proxy, session, [{"role": "user", "content": text}]))
        beside = await short_calls(proxy)
        await long
        figures["long_tokens"] = int(sum(len(node.prompt_ids) for node in session.tree.completions))
        for name, taken in (("alone", alone), ("beside", beside)):
            figures[f"{name}_ms"] = 1e3 * taken[len(taken) // 2]
            figures[f"{name}_p99_ms"] = 1e3 * taken[int(0.99 * len(taken))]
        figures["held_up"] = figures["beside_p99_ms"] / figures["alone_p99_ms"]

    await instantly(work)
    print(f"64 short ones beside a long one: {figures}", file=sys.stderr)
    return figures


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
        "waiting_agents": await waiting_agents(),
        "beside_a_long_one": await beside_a_long_one(),
        "turns_with_model": await turns_with_model(),
        "group_size": await group_size(),
        "train_group_size": await train_group_size(),
        "concurrent_episodes": await concurrent_episodes(),
        "model_size": await model_size(),
    }


def run() -> tuple[dict[str, Any], list[Aim]]:
    torch.set_num_threads(1)
    figures = asyncio.run(measure())
    bounded = ("group_size", "train_group_size", "concurrent_episodes", "waiting_agents")
    waiting = figures["waiting_agents"]["bytes_each"][WAITING[-1]]
    held_up = figures["beside_a_long_one"]["held_up"]
    aims = [
        Aim.at_most("exponent of the cost in turns, without a model", figures["turns"]["exponent"], FLAT),
        Aim.at_most("a call at turns 180 to 200 over one at 20 to 40", figures["turns"]["late_over_early"], 1.2),
        *(
            Aim.at_most(f"exponent of the cost in {name.replace('_', ' ')}", figures[name]["exponent"], LINEAR)
            for name in bounded
        ),
        Aim.at_most(f"bytes of each of {WAITING[-1]} agents that wait for a tool", waiting, WAITING_BYTES),
        Aim.at_most("short calls beside one of 32k tokens over alone, p99", held_up, HELD_UP),
    ]
    return figures, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
