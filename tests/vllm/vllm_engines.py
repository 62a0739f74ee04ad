"""Engines on one real vLLM server, for the tests that all engines must pass and for its own."""

from pathlib import Path

from areal.api.engine_api import WeightUpdate
from areal.config.training import OptimizerConfig
from areal.engine.inference.http_engine import HttpServer, directory_digest
from areal.engine.inference.vllm import VllmEngine
from areal.engine.model.architecture import read_architecture
from areal.engine.training.engine import TrainingEngine


class VllmEngines:
    """Opens engines on the server, and publishes weights for them."""

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
