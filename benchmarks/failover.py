"""What do agents notice when engines die? Two engines under load, one of them killed every few seconds.

24 agents talk to the built-in model through the proxy with the OpenAI SDK, two turns to a conversation, half of them
streaming. Every 5 s one of two engines that serve is killed (SIGKILL) and started again as in a run; while only one
serves, the next kill waits. vLLM takes long to start, so its engines are killed for as long as a few kills need. With
it, the engine process and each process of vLLM's own are killed in turn. All answers have the same length; each must be
complete, a streamed one must be what was recorded, and the log-probs that came with the tokens are compared with those
of the model for just these conversations, which a gap or a repeat would change.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI

from areal.api.messages import EngineAddress
from areal.config.rollout import GenerationHyperparameters, RolloutConfig
from areal.config.training import OptimizerConfig, SchedulerConfig
from areal.engine.inference.group import EngineConnections, EngineGroup
from areal.engine.models import find_model, max_positions, open_trainable
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.engine.training.packing import Span
from areal.proxy import Proxy
from areal.trainer.engines import EngineMember, Engines, EngineState
from areal.trainer.processes import Processes
from areal.trajectory import Tree, export
from areal.utils.hf_utils import load_hf_tokenizer
from benchmarks.engine import vllm_python
from benchmarks.report import Aim, main

AGENTS = 24
ANSWER_TOKENS = 200
TURNS = 2
KILL_SECONDS = 5.0
LEAST_KILLS = 3
"""Of engines that take longer to start than the time in which they are to be killed."""
START_SECONDS = 600.0
BACKENDS = ("embedded", "vllm")
END_SECONDS = 300.0
"""For the agents to finish, once engines are left alone."""


@dataclass
class Figures:
    calls: int = 0
    errors: list[str] = field(default_factory=list)
    incomplete: int = 0
    """Answers of another length."""
    different: int = 0
    """Streamed answers that were not what was recorded: a gap, or a repeat."""
    seconds: list[float] = field(default_factory=list)
    """Of each call."""
    kills: int = 0
    killed_for_seconds: float = 0.0
    """Until the last kill."""
    recovery_seconds: list[float] = field(default_factory=list)
    """From each kill until the engine served again."""
    trees: list[Tree] = field(default_factory=list)
    """The conversations as they were recorded."""


class Stage:
    """Two engines as the driver of a run has them, and the proxy that a rollout worker has."""

    def __init__(self, model: Path, logs: Path, rollout: RolloutConfig) -> None:
        self.failures: list[Exception] = []
        self.group = EngineGroup()
        self.processes = Processes(SchedulerConfig(max_restarts=1000), logs, self.failures.append)
        self.connections = EngineConnections(self.group, self.processes.secret)
        self.engines = Engines.of(rollout, model, self.processes, self._follow, threads=2)
        self._following: set[asyncio.Task[None]] = set()
        gconfig = GenerationHyperparameters(max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS)
        tokenizer = load_hf_tokenizer(model)
        self.proxy = Proxy(self.group, tokenizer, gconfig=gconfig, max_positions=max_positions(model))

    def _follow(self, engines: list[EngineAddress]) -> None:
        following = asyncio.ensure_future(self.connections.follow(engines))
        self._following.add(following)
        following.add_done_callback(self._following.discard)


@asynccontextmanager
async def stage(model: Path, logs: Path, rollout: RolloutConfig) -> AsyncIterator[Stage]:
    opened = Stage(model, logs, rollout)
    try:
        async with asyncio.timeout(START_SECONDS):
            await opened.processes.start(opened.engines.members)
            await opened.group.until_serving()
        await opened.proxy.start()
        yield opened
    finally:
        await opened.proxy.aclose()
        await opened.group.aclose()
        await opened.engines.close()
        await opened.processes.close()


async def agent(number: int, stage: Stage, over: asyncio.Event, figures: Figures) -> None:
    """Conversations until the time is over."""
    conversation = 0
    while not over.is_set():
        session = stage.proxy.open_session(seed=number * 1_000_000 + conversation)
        conversation += 1
        in_process: Any = stage.proxy.http_client
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=in_process, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": f"Sort {number}{conversation}"}]
        for _ in range(TURNS):
            began = time.monotonic()
            figures.calls += 1
            try:
                said, count = await (streamed if number % 2 else whole)(client, messages)
            except Exception as error:  # whatever an agent can see
                figures.errors.append(f"{type(error).__name__}: {error}")
                break
            figures.seconds.append(time.monotonic() - began)
            figures.incomplete += count != ANSWER_TOKENS
            figures.different += said != (session.tree.completions[-1].message.get("content") or "")
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again"}]
        await stage.proxy.end_session(session)
        figures.trees.append(session.tree)


async def whole(client: Any, messages: list[Any]) -> tuple[str, int]:
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content or "", reply.usage.completion_tokens


async def streamed(client: Any, messages: list[Any]) -> tuple[str, int]:
    said, count = "", 0
    events = await client.chat.completions.create(
        model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    async for event in events:
        said += (event.choices[0].delta.content or "") if event.choices else ""
        count = event.usage.completion_tokens if event.usage else count
    return said, count


async def kill(stage: Stage, seconds: float, figures: Figures) -> None:
    """One of two engines that serve, every few seconds, the one that was killed longest ago first."""
    members, began = list(stage.engines.members), time.monotonic()
    due = began + KILL_SECONDS
    while due - began < seconds or figures.kills < LEAST_KILLS:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        victim = members[0]
        assert victim.placement is not None
        processes = process_tree(victim.placement.pid)
        os.kill(processes[figures.kills % len(processes)], signal.SIGKILL)
        due = time.monotonic() + KILL_SECONDS
        figures.kills += 1
        figures.killed_for_seconds = time.monotonic() - began
        members.sort(key=lambda member: member is victim)
        figures.recovery_seconds.append(await asyncio.wait_for(recovery(stage, victim), START_SECONDS))


def process_tree(pid: int) -> list[int]:
    """A process, its children and theirs, but for Python's own helpers, whose death changes nothing."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return [each for each in found if b"resource_tracker" not in Path(f"/proc/{each}/cmdline").read_bytes()]


async def recovery(stage: Stage, victim: EngineMember) -> float:
    """Seconds until the engine that was just killed serves again."""
    began = time.monotonic()
    await stage.engines.until(lambda: victim.state is not EngineState.SERVING)
    await stage.engines.until(lambda: victim.state is EngineState.SERVING)
    return time.monotonic() - began


def logprob_difference(model: Path, trees: list[Tree]) -> float:
    """Between the log-probs that came with the tokens and those of the model for the conversations as recorded."""
    rows = [row for tree in trees for row in export(tree, "concat", 1.0)]
    spans = [Span(row.input_ids, np.flatnonzero(row.loss_mask), number) for number, row in enumerate(rows)]
    recorded = torch.from_numpy(np.concatenate([row.logprobs[row.loss_mask] for row in rows]))
    trainer = TrainingEngine(open_trainable(model), OptimizerConfig(), total_steps=1)
    computed = trainer.logprobs(TokenBatch(spans, torch.ones(len(recorded))))
    return float((computed - recorded).abs().max())


async def play(model: Path, rollout: RolloutConfig, seconds: float, figures: Figures) -> dict[str, Any]:
    over = asyncio.Event()

    async def kill_and_end(opened: Stage) -> None:
        try:
            await kill(opened, seconds, figures)
        finally:
            over.set()

    with tempfile.TemporaryDirectory() as logs:
        async with stage(model, Path(logs), rollout) as opened:
            agents = [agent(number, opened, over, figures) for number in range(AGENTS)]
            playing = asyncio.gather(kill_and_end(opened), *agents)
            await over.wait()
            await asyncio.wait_for(playing, END_SECONDS)
            group = opened.group
            return {
                "moved": group.moved,
                "tokens_again": group.tokens_again,
                "outages": group.outages,
                "failures": [str(each) for each in opened.failures],
            }


def measure(backend: str, seconds: float) -> tuple[dict[str, Any], list[Aim]]:
    """The figures and aims of one kind of engine."""
    print(f"{backend} …", file=sys.stderr, flush=True)
    rollout = RolloutConfig(backend=f"{backend}:d2")
    if backend == "vllm":
        rollout = replace(rollout, python=str(vllm_python()), engine_args=["--enforce-eager"])
    model, figures = find_model("builtin:tiny-math"), Figures()
    moves = asyncio.run(play(model, rollout, seconds, figures))
    difference = logprob_difference(model, figures.trees)
    answered = len(figures.seconds)
    for error in figures.errors[:3]:
        print(error, file=sys.stderr)
    report = {
        "kills": figures.kills,
        "killed_for_seconds": round(figures.killed_for_seconds, 1),
        "calls": figures.calls,
        "answered": answered,
        "tokens": answered * ANSWER_TOKENS,
        **moves,
        "recovery_seconds": {
            "median": statistics.median(figures.recovery_seconds),
            "max": max(figures.recovery_seconds),
        },
        "call_seconds": {"median": statistics.median(figures.seconds), "max": max(figures.seconds)},
        "max_logprob_difference": difference,
    }
    aims = [
        Aim.at_least(f"{backend}: engines killed under load", figures.kills, LEAST_KILLS),
        Aim.at_least(f"{backend}: requests that went on at another engine", moves["moved"], 1),
        Aim.at_most(f"{backend}: errors that agents saw", len(figures.errors), 0),
        Aim.at_most(f"{backend}: answers that are not complete", figures.incomplete, 0),
        Aim.at_most(f"{backend}: streamed answers with a gap or a repeat", figures.different, 0),
        Aim.at_most(f"{backend}: difference of log-probs from those of the recorded conversations", difference, 1e-4),
    ]
    return report, aims


def run(backends: Sequence[str], seconds: float) -> tuple[dict[str, Any], list[Aim]]:
    reports: dict[str, Any] = {"seconds": seconds}
    aims: list[Aim] = []
    for backend in backends:
        reports[backend], reached = measure(backend, seconds)
        aims += reached
    return reports, aims


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=BACKENDS, help="the kind of engine; left out = each in turn")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long engines are killed")
    options, _ = parser.parse_known_args()
    chosen = BACKENDS if options.backend is None else (options.backend,)
    main(__doc__ or "", partial(run, chosen, options.seconds), parser)
