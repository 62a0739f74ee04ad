"""One real vLLM server for all tests here, with the interpreter of .venv-vllm; `make test-vllm` makes that.

Other test runs leave these tests out: they need that environment, and minutes.
"""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "engine"), str(TESTS / "e2e")]  # the conformance suite and its models; real runs

import engine_kinds  # noqa: E402
from tiny_models import write_model  # noqa: E402
from vllm_engines import VllmEngines, vllm_process  # noqa: E402

from areal.api.engine_api import InferenceEngine  # noqa: E402
from areal.engine.inference.vllm import START_SECONDS  # noqa: E402

engine_kinds.PATIENCE_SECONDS = 300.0
"""On a machine that is busy with other things, vLLM draws ten tokens a second."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(START_SECONDS + 300))
            if config.option.markexpr != "vllm":
                item.add_marker(pytest.mark.skip(reason="run make test-vllm"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngines]:
    model = write_model(tmp_path_factory.mktemp("model"), head_dim=32)  # vLLM's attention on a CPU takes no smaller one
    sockets = tmp_path_factory.mktemp("s")  # a socket's path must be short
    async with vllm_process(model, sockets) as vllm:
        engines = VllmEngines(vllm, model)
        yield engines
        engines.trainer.close()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(engines: VllmEngines) -> AsyncIterator[InferenceEngine]:
    engine = await engines.open()
    yield engine
    await engine.aclose()
