"""Engines of every kind, and requests to them, for the tests that all of them must pass."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from engine_process import EngineProcess, engine_process
from tiny_models import TINY, byte_tokenizer, write_model

from areal.api.engine_api import EngineHealth, InferenceEngine, WeightUpdate
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.config.rollout import GenerationHyperparameters
from areal.config.training import OptimizerConfig
from areal.engine.inference.fake import FakeEngine
from areal.engine.inference.group import EngineGroup
from areal.engine.inference.server import load_engine
from areal.engine.model.architecture import read_architecture
from areal.engine.training.engine import TrainingEngine

T = TypeVar("T")
PATIENCE_SECONDS = 60.0
"""How long a test waits for anything; tests of engines that are slower set it."""
LONG = 2000
"""Tokens that take far longer to draw than a call takes to reach the engine."""


class Engines:
    """Opens engines of one kind, and publishes weights for them."""

    of_others = False
    """They are an adapter to a program of others."""

    def __init__(self, kind: str, model: Path, process: EngineProcess | None) -> None:
        self.kind, self.model, self.process = kind, model, process
        architecture = read_architecture(model)
        self.trainer = TrainingEngine(architecture, OptimizerConfig(), total_steps=1, directory=model)

    async def open(self) -> Any:
        if self.process is not None:
            return await self.process.connect()
        if self.kind in ("embedded", "torch"):
            return load_engine(self.model, kernel="torch" if self.kind == "torch" else "auto")
        if self.kind == "group":
            group = EngineGroup()
            group.add("one", load_engine(self.model))
            group.add("two", load_engine(self.model))
            return group
        return FakeEngine(vocab_size=261, max_positions=TINY.max_positions, tokenizer=byte_tokenizer())

    def publish(self) -> WeightUpdate:
        """Weights that differ a little from the last ones."""
        self.trainer.flat *= 1.01
        self.trainer.version += 1
        return self.trainer.publish()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", "torch", "server", "fake", "group"])
async def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    place = tmp_path_factory.mktemp("model")
    model = write_model(place / "model")
    async with AsyncExitStack() as stack:
        process = None
        if request.param == "server":
            process = await stack.enter_async_context(engine_process(model, place / "engine.log"))
        engines = Engines(request.param, model, process)
        stack.callback(engines.trainer.close)
        yield engines


@pytest_asyncio.fixture(loop_scope="module")
async def engine(engines: Engines) -> AsyncIterator[InferenceEngine]:
    engine = await engines.open()
    yield engine
    await engine.aclose()


def ask(ids: list[int] | None = None, **settings: Any) -> ModelRequest:
    settings.setdefault("max_new_tokens", 12)
    return ModelRequest("r", ids or [1, 2, 3], GenerationHyperparameters(**settings))


async def soon(awaitable: Awaitable[T]) -> T:
    async with patience():
        return await awaitable


def patience() -> asyncio.Timeout:
    return asyncio.timeout(PATIENCE_SECONDS)


async def answer(engine: InferenceEngine, *args: Any, **settings: Any) -> ModelResponse:
    return await soon(engine.agenerate(ask(*args, **settings)))


async def until(engine: InferenceEngine, **wanted: int) -> EngineHealth:
    """The engine's health, once it shows that many requests running and waiting."""
    async with patience():
        while True:
            health = await engine.health()
            if all(getattr(health, name) == count for name, count in wanted.items()):
                return health
            await asyncio.sleep(0)  # each look is a call that the engine answers between two steps


async def begin(engine: InferenceEngine, count: int = 1, **settings: Any) -> "list[asyncio.Task[ModelResponse]]":
    """Requests that have drawn their first tokens."""
    tasks = [asyncio.create_task(engine.agenerate(ask([5 + i], seed=i, **settings))) for i in range(count)]
    await until(engine, running=count)
    return tasks
