"""One real vLLM server for all tests here, with the interpreter of .venv-vllm; `make test-vllm` makes that.

Without it the tests are left out, so that `make test` needs no second environment.
"""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "engine"))  # the conformance suite and its models

from tiny_models import write_model  # noqa: E402

from areal.api.engine_api import InferenceEngine, WeightUpdate  # noqa: E402
from areal.config.training import OptimizerConfig  # noqa: E402
from areal.engine.inference.http_engine import HttpServer, directory_digest  # noqa: E402
from areal.engine.inference.vllm import VllmEngine, open_vllm  # noqa: E402
from areal.engine.model.architecture import read_architecture  # noqa: E402
from areal.engine.training.engine import TrainingEngine  # noqa: E402

PYTHON = TESTS.parent / ".venv-vllm" / "bin" / "python"
START_SECONDS = 600


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.timeout(START_SECONDS + 300))
        if not config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="run make test-vllm"))


class VllmEngines:
    """Opens engines on one server, and publishes weights for them."""

    def __init__(self, owner: VllmEngine, model: Path, place: Path) -> None:
        self.owner, self.model, self.place = owner, model, place
        self.trainer = TrainingEngine(read_architecture(model), OptimizerConfig(), total_steps=1, directory=model)

    async def open(self) -> VllmEngine:
        engine = await VllmEngine.connect(HttpServer("vLLM", self.owner.server.address), self.model)
        await engine.resume()  # a test that failed may have left it paused
        return engine

    def publish(self) -> WeightUpdate:
        """Weights that differ a little from the last ones."""
        self.trainer.flat *= 1.01
        self.trainer.version += 1
        directory = self.place / f"version-{self.trainer.version}"
        self.trainer.save(str(directory))
        return WeightUpdate(self.trainer.version, directory_digest(directory), str(directory))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngines]:
    place = tmp_path_factory.mktemp("vllm")
    model = write_model(place / "model", head_dim=32)  # vLLM's attention on a CPU takes no smaller one
    owner = await open_vllm(model, python=str(PYTHON), options=["--enforce-eager"], timeout_seconds=START_SECONDS)
    engines = VllmEngines(owner, model, place)
    yield engines
    engines.trainer.close()
    await owner.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(engines: VllmEngines) -> AsyncIterator[InferenceEngine]:
    engine = await engines.open()
    yield engine
    await engine.aclose()
