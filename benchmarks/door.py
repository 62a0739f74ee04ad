"""What does the engine process in front of vLLM cost? The same requests to vLLM itself, and through that process.

32 requests with random prompts, as token ids, run at once and are sampled at temperature 1 up to a fixed length. In one
process, with one vLLM server, three ways take turns, a few rounds of all: streams of vLLM's own token route, streams
through the engine process (as a rollout worker has them), and calls through it that do not stream. The machine's speed
changes during a measurement, so each round compares its ways with each other, and the median of the rounds counts. CPU
seconds are those of vLLM, the engine process and the client together.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.http_server import HttpServer
from areal.engine.inference.remote import RemoteEngine
from areal.engine.inference.vllm import START_SECONDS
from areal.engine.models import find_model, vocab_size
from areal.infra.rpc.connect import connect
from areal.infra.rpc.shipping import SCRATCH_VARIABLE
from areal.infra.rpc.wire import api_wire
from benchmarks.engine import vllm_python
from benchmarks.report import Aim, main
from benchmarks.smollm2 import smollm2

STREAMS = 32
PROMPT_TOKENS, ANSWER_TOKENS = 32, 48
ROUNDS = 4
ROUND_SECONDS = 600.0
END_SECONDS = 60.0
LEAST_RATIO = 0.95


@dataclass
class Door:
    """An engine process with vLLM, and the ways to it."""

    process: asyncio.subprocess.Process
    engine: RemoteEngine
    vllm: HttpServer

    async def cpu_seconds(self) -> float:
        """Of all processes that take part."""
        served: float = await self.engine.channel.call("cpu_seconds", timeout_seconds=ROUND_SECONDS)
        return served + time.process_time()


@asynccontextmanager
async def door(model: Path) -> AsyncIterator[Door]:
    with tempfile.TemporaryDirectory(prefix="areal-") as place:
        address = f"unix:{place}/engine"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "areal.engine.inference.server", str(model), "--backend", "vllm"),
            *("--python", str(vllm_python()), "--engine-arg=--enforce-eager", "--listen", address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, SCRATCH_VARIABLE: place},
        )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
            assert line, "the engine process ended while it started"
            (socket,) = glob(f"{place}/areal-vllm-*/socket")
            engine = RemoteEngine(await connect(address, wire=api_wire(), peer="the engine"))
            vllm = HttpServer("vLLM", f"unix:{socket}")
            try:
                yield Door(process, engine, vllm)
            finally:
                await vllm.close()
                await engine.aclose()
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.wait(), END_SECONDS)


async def direct_stream(door: Door, prompt: list[int], seed: int) -> int:
    sampling = {
        **{"temperature": 1.0, "seed": seed, "max_tokens": ANSWER_TOKENS, "min_tokens": ANSWER_TOKENS},
        **{"ignore_eos": True, "logprobs": 0, "detokenize": False, "stream_interval": 1},
    }
    body = {"token_ids": prompt, "stream": True, "sampling_params": sampling}
    count = 0
    async with aclosing(door.vllm.events("/inference/v1/generate", body)) as events:
        async for event in events:
            count += len(event["choices"][0]["token_ids"])
    return count


def request(prompt: list[int], seed: int) -> ModelRequest:
    gconfig = GenerationHyperparameters(
        max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS, temperature=1.0, seed=seed
    )
    return ModelRequest(str(seed), prompt, gconfig)


async def door_stream(door: Door, prompt: list[int], seed: int) -> int:
    count = 0
    async with aclosing(door.engine.astream(request(prompt, seed))) as chunks:
        async for chunk in chunks:
            count += len(chunk.tokens)
    return count


async def door_call(door: Door, prompt: list[int], seed: int) -> int:
    return (await door.engine.agenerate(request(prompt, seed))).output_len


WAYS: dict[str, Callable[[Door, list[int], int], Awaitable[int]]] = {
    "direct": direct_stream,
    "streams through the engine process": door_stream,
    "calls through the engine process": door_call,
}


async def one_round(way: str, door: Door, vocabulary: int, number: int) -> dict[str, float]:
    """Its seconds and CPU seconds for each token."""
    prompts = random.Random(number)
    asked = [[prompts.randrange(5, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(STREAMS)]
    cpu, began = await door.cpu_seconds(), time.monotonic()
    calls = (WAYS[way](door, prompt, number * STREAMS + seed) for seed, prompt in enumerate(asked))
    counts = await asyncio.wait_for(asyncio.gather(*calls), ROUND_SECONDS)
    seconds = time.monotonic() - began
    assert counts == [ANSWER_TOKENS] * STREAMS, counts
    tokens = sum(counts)
    return {"seconds": seconds / tokens, "cpu_seconds": (await door.cpu_seconds() - cpu) / tokens}


async def measure(model: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    vocabulary, found = vocab_size(model), {way: list[dict[str, float]]() for way in WAYS}
    async with door(model) as opened:
        await one_round("direct", opened, vocabulary, 0)  # what is computed or compiled at first is not measured
        for turn in range(rounds):
            for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                print(f"round {turn + 1} of {rounds}: {way} …", file=sys.stderr, flush=True)
                # Other prompts each time: vLLM keeps what it has computed of them.
                number = 1 + turn * len(WAYS) + list(WAYS).index(way)
                found[way].append(await one_round(way, opened, vocabulary, number))
    return found


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Aim]]:
    model = find_model("builtin:tiny-math") if options.tiny else smollm2()
    found = asyncio.run(measure(model, options.rounds))
    figures: dict[str, Any] = {"model": model.name, "at_once": STREAMS, "rounds": options.rounds}
    direct, *doors = WAYS

    def over_direct(way: str, what: str) -> float:
        pairs = zip(found[direct], found[way], strict=True)
        return statistics.median(straight[what] / through[what] for straight, through in pairs)

    for way, rounds in found.items():
        figures[way] = {
            "tokens_per_second": round(statistics.median(1 / each["seconds"] for each in rounds), 1),
            "cpu_ms_per_token": round(statistics.median(1e3 * each["cpu_seconds"] for each in rounds), 3),
        }
    for way in doors:
        figures[way]["speed_over_direct"] = round(over_direct(way, "seconds"), 4)
        figures[way]["cpu_over_direct"] = round(1 / over_direct(way, "cpu_seconds"), 4)
    aims = [
        Aim.at_least(f"{way}: speed over direct streams", over_direct(way, "seconds"), LEAST_RATIO) for way in doors
    ]
    return figures, aims


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each way is measured")
    parser.add_argument("--tiny", action="store_true", help="the built-in model instead of 135M parameters")
    options, _ = parser.parse_known_args()
    main(__doc__ or "", partial(run, options), parser)
