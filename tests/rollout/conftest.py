"""A policy that says what a test wants, behind the real proxy, and agents that reach it with the real SDK."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from sdk_call import DATA, MAX_POSITIONS

from areal.api.messages import Episode, Rejection
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy
from areal.rollout.episodes import run_episode
from areal.rollout.runners.agent import AgentRunner
from areal.rollout.runners.workflow import WorkflowRunner


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
