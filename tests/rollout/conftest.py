"""A policy that says what a test wants, served by the real proxy, and agents that reach it with the real SDK."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sdk_call import DATA, MAX_POSITIONS

from areal.api.messages import EngineAddress, Episode, Rejection, WorkerSetup
from areal.config.rollout import AgentConfig, GenerationHyperparameters, ProxyConfig, RolloutConfig
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.engine.inference.remote import GENERATE_ROLE, worker_handlers
from areal.infra.rpc.connect import Listener, serve
from areal.infra.rpc.frames import role_secret
from areal.infra.rpc.wire import api_wire
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy
from areal.rollout.episodes import run_episode
from areal.rollout.loading import WorkflowSpec
from areal.rollout.runners.agent import AgentRunner
from areal.rollout.runners.workflow import WorkflowRunner
from areal.rollout.worker import RolloutWorker
from areal.utils.logging import getLogger


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(["Sort 5291 into 1259, hello there, add the numbers"] * 4, 300, MAX_POSITIONS)


@pytest.fixture
async def engine(tokenizer: Any) -> FakeEngine:
    """Answers every prompt with 1259."""
    answer = [*tokenizer.encode("1259"), tokenizer.eos_token_id]

    def script(ids: Sequence[int]) -> Sequence[int]:
        return answer

    return FakeEngine(vocab_size=len(tokenizer), max_positions=MAX_POSITIONS, script=script, tokenizer=tokenizer)


@pytest.fixture
def gconfig() -> GenerationHyperparameters:
    return GenerationHyperparameters(max_new_tokens=64)


@pytest.fixture
async def proxy(engine: FakeEngine, tokenizer: Any, gconfig: GenerationHyperparameters) -> AsyncIterator[Proxy]:
    proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=MAX_POSITIONS)
    await proxy.start()
    yield proxy
    await proxy.aclose()


Play = Callable[..., Awaitable[Episode | Rejection]]


@pytest.fixture
def play(proxy: Proxy, gconfig: GenerationHyperparameters) -> Play:
    """Run one episode of an agent to its outcome."""

    async def play(agent: Any, *, seconds: float = 60, is_eval: bool = False, greedy: bool = False, **config: Any):
        runner = AgentRunner(agent, proxy, AgentConfig(**config), gconfig)
        context = WorkflowContext(is_eval=is_eval, task_id=7)
        outcome, _ = await run_episode(runner, dict(DATA), context, greedy=greedy, seconds=seconds)
        return outcome

    return play


@pytest.fixture
def play_workflow(engine: FakeEngine, tokenizer: Any) -> Play:
    """Run one episode of a RolloutWorkflow to its outcome."""

    async def play(workflow: Any, *, seconds: float = 60, is_eval: bool = False, greedy: bool = False):
        runner = WorkflowRunner(workflow, engine, tokenizer)
        context = WorkflowContext(is_eval=is_eval, task_id=7)
        outcome, _ = await run_episode(runner, dict(DATA), context, greedy=greedy, seconds=seconds)
        return outcome

    return play


@pytest.fixture
async def engine_listener(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Listener]:
    """The engine served on a socket, as in a run."""
    listener = await serve(
        f"unix:{tmp_path}/engine",
        lambda channel: channel.handlers.update(worker_handlers(engine, channel)),
        wire=api_wire(),
        secret=role_secret(b"", GENERATE_ROLE),
    )
    yield listener
    await listener.close()


@pytest.fixture
async def start_worker(
    engine_listener: Listener, tokenizer: Any, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[RolloutWorker]]]:
    """Start a worker: `await start_worker(MyAgent, stall_seconds=1)`; further options are those of `rollout`."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    async with AsyncExitStack() as stack:

        async def start(
            workflow: Any,
            eval_workflow: Any = None,
            *,
            proxy: ProxyConfig | None = None,
            seed: int | None = None,
            **rollout: Any,
        ) -> RolloutWorker:
            setup = WorkerSetup(
                rollout=RolloutConfig(**rollout),
                gconfig=GenerationHyperparameters(n_samples=4, max_new_tokens=64),
                workflow=WorkflowSpec(workflow).pack(),
                eval_workflow=WorkflowSpec(eval_workflow).pack() if eval_workflow else b"",
                engines=[EngineAddress("engine", 1, engine_listener.address)],
                tokenizer_path=str(tmp_path / "tokenizer"),
                max_positions=MAX_POSITIONS,
                reward_fn="",
                proxy=proxy or ProxyConfig(),
                seed=seed,
            )
            worker = await RolloutWorker.start(setup)
            stack.push_async_callback(worker.aclose)
            return worker

        yield start


@pytest.fixture
def rollout_log() -> Iterator[list[str]]:
    """What is logged under the name of rollout."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    getLogger("rollout").addHandler(handler)
    yield lines
    getLogger("rollout").removeHandler(handler)
