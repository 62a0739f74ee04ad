"""A real vLLM server is given adapters: its log-probs are the trainer's under each, also of answers in progress."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from engine_kinds import begin, soon
from tiny_models import byte_tokenizer, write_model
from transformers_models import batch, requests, sampled
from vllm_engines import PYTHON

from areal.api.engine_api import WeightUpdate
from areal.config.rollout import RolloutConfig
from areal.config.training import LoraConfig, OptimizerConfig
from areal.engine.inference.vllm import VllmEngine, open_vllm
from areal.engine.models import open_adapted
from areal.engine.training.engine import TrainingEngine
from areal.trainer.canary import TOLERANCES, Canaries
from areal.trainer.engines import with_adapters

pytestmark = pytest.mark.asyncio(loop_scope="session")

LORA = LoraConfig(rank=4)
TOLERANCE = 1e-4


class Adapters:
    def __init__(self, engine: VllmEngine, trainer: TrainingEngine, model: Path) -> None:
        self.engine, self.trainer, self.model = engine, trainer, model
        self._canaries = Canaries(byte_tokenizer(), TOLERANCES["float32"])

    def publish(self, *, canary: bool = True) -> WeightUpdate:
        """One that differs a lot from the last."""
        self.trainer.version += 1
        generator = torch.Generator().manual_seed(self.trainer.version)
        with torch.no_grad():
            self.trainer.flat.copy_(0.2 * torch.randn(self.trainer.flat.shape, generator=generator))
        update = self.trainer.publish()
        return self._canaries.attached(update, self.trainer) if canary else update


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def adapters(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapters]:
    model: Path = write_model(tmp_path_factory.mktemp("model"), head_dim=32)
    trainer = TrainingEngine(
        open_adapted(model, LORA, name=str(model), seed=1), OptimizerConfig(), total_steps=1, max_tokens_per_mb=4096
    )
    rollout = with_adapters(RolloutConfig(backend="vllm", engine_args=["--enforce-eager"]), LORA)
    place = tmp_path_factory.mktemp("s")
    engine = await open_vllm(model, python=str(PYTHON), arguments=rollout.engine_args, scratch=place)
    yield Adapters(engine, trainer, model)
    await engine.aclose()
    trainer.close()


async def test_logprobs_are_the_trainers_under_every_adapter(adapters: Adapters) -> None:
    for _ in range(3):
        update = adapters.publish()
        await adapters.engine.update_weights(update)  # its canary is asked for
        health = await adapters.engine.health()
        assert (health.version, health.digest) == (update.version, update.digest)
        asked = requests(adapters.model, 6, with_images=False)
        answers = await soon(asyncio.gather(*map(adapters.engine.agenerate, asked)))
        assert {version for each in answers for version in each.output_versions} == {update.version}
        found = adapters.trainer.logprobs(batch(asked, answers))
        torch.testing.assert_close(found, sampled(answers), atol=TOLERANCE, rtol=0)


async def test_answers_in_progress_go_on_with_the_new_adapter(adapters: Adapters) -> None:
    """Without a canary: vLLM 0.32 ends when prompt log-probs under an adapter are asked beside other requests."""
    await adapters.engine.update_weights(adapters.publish(canary=False))
    tasks = await begin(adapters.engine, 3, max_new_tokens=60)
    for _ in range(2):
        await adapters.engine.update_weights(adapters.publish(canary=False))
    answers = await soon(asyncio.gather(*tasks))
    newest = adapters.trainer.version
    for each in answers:
        assert each.output_len == 60
        assert each.output_versions[-1] == newest
