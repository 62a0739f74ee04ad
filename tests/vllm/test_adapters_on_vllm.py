"""A real vLLM server is given adapters: its log-probs are the trainer's under each, also of answers in progress."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from engine_kinds import ask, begin, soon, until
from tiny_models import byte_tokenizer, write_model
from transformers_models import batch, requests, sampled
from vllm_engines import PYTHON

from areal.api.engine_api import WeightUpdate
from areal.api.errors import WrongWeights
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

    def publish(self) -> WeightUpdate:
        """One that differs a lot from the last."""
        self.trainer.version += 1
        generator = torch.Generator().manual_seed(self.trainer.version)
        with torch.no_grad():
            self.trainer.flat.copy_(0.2 * torch.randn(self.trainer.flat.shape, generator=generator))
        return self._canaries.attached(self.trainer.publish(), self.trainer)


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
    """The canaries are asked for in the same steps: vLLM's own way to compute them would end it here."""
    await adapters.engine.update_weights(adapters.publish())
    asked = [ask([5 + number] * (3 + 9 * number), seed=number, max_new_tokens=60) for number in range(4)]
    tasks = [asyncio.create_task(adapters.engine.agenerate(request)) for request in asked]
    await until(adapters.engine, running=4)
    flats = {adapters.trainer.version: adapters.trainer.flat.detach().clone()}
    for _ in range(2):
        await adapters.engine.update_weights(adapters.publish())
        flats[adapters.trainer.version] = adapters.trainer.flat.detach().clone()
    answers = await soon(asyncio.gather(*tasks))
    versions = torch.tensor([version for each in answers for version in each.output_versions])
    assert all(each.output_len == 60 and each.output_versions[-1] == adapters.trainer.version for each in answers)
    for version in versions.unique().tolist():
        adapters.trainer.flat.copy_(flats[version])
        found = adapters.trainer.logprobs(batch(asked, answers))[versions == version]
        torch.testing.assert_close(found, sampled(answers)[versions == version], atol=TOLERANCE, rtol=0)


async def test_canaries_beside_other_requests_have_the_adapter_of_the_canary(adapters: Adapters) -> None:
    await adapters.engine.update_weights(update := adapters.publish())
    assert update.canary is not None
    tasks = await begin(adapters.engine, 3, max_new_tokens=80)
    scores = await soon(asyncio.gather(*(adapters.engine.score(update.canary.tokens) for _ in range(3))))
    for found in scores:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(update.canary.logprobs), atol=TOLERANCE, rtol=0)
    await soon(asyncio.gather(*tasks))


async def test_an_adapter_that_was_not_loaded_is_found_out(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = adapters.publish()
    kept = shutil.copytree(old.path, tmp_path / "old")
    await adapters.engine.update_weights(old)
    new, load = adapters.publish(), adapters.engine._load_adapter
    with monkeypatch.context() as patched:
        patched.setattr(adapters.engine, "_load_adapter", lambda update: load(replace(update, path=str(kept))))
        with pytest.raises(WrongWeights, match=rf"stale: the log-probs of version {old.version} are"):
            await adapters.engine.update_weights(new)
    await adapters.engine.update_weights(adapters.publish())
