"""Models that transformers computes: the engine reports the log-probs that the trainer computes, images included."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers_models import WRITERS, batch, image_ids, requests, sampled, trainer

from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.models import open_runner
from areal.engine.transformers.runner import TransformersRunner

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4


@pytest.fixture(params=WRITERS, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("models") / request.param)


async def test_logprobs_agree_while_requests_come_and_go(model: Path) -> None:
    """More requests than rows, so sequences move between rows; windows are shorter than the sequences."""
    engine = EmbeddedEngine(open_runner(model), max_running=5)
    asked = requests(model, 12, with_images=model.name == "llava")
    answers = await asyncio.gather(*map(engine.agenerate, asked))
    torch.testing.assert_close(trainer(model).logprobs(batch(asked, answers)), sampled(answers), atol=TOLERANCE, rtol=0)
    await engine.aclose()


async def test_logprobs_agree_with_the_weights_of_each_tokens_version(model: Path) -> None:
    engine, learner = EmbeddedEngine(open_runner(model)), trainer(model)
    asked = requests(model, 3, with_images=model.name == "llava", max_new_tokens=40)
    tasks = [asyncio.create_task(engine.agenerate(request)) for request in asked]
    weights = {0: learner.flat.detach().clone()}
    for version in (1, 2):
        produced = engine.tokens_generated
        async with asyncio.timeout(60):
            while engine.tokens_generated < produced + 40:
                await engine.health()  # raises if it failed
                await asyncio.sleep(0)  # one step of the engine
        learner.version = version
        learner.flat.mul_(1.2)
        weights[version] = learner.flat.detach().clone()
        await engine.update_weights(learner.publish())
    answers = await asyncio.gather(*tasks)
    versions = torch.tensor([version for response in answers for version in response.output_versions])
    assert set(versions.tolist()) == {0, 1, 2}
    for version, flat in weights.items():
        learner.flat.copy_(flat)
        of_version = versions == version
        torch.testing.assert_close(
            learner.logprobs(batch(asked, answers))[of_version], sampled(answers)[of_version], atol=TOLERANCE, rtol=0
        )
    await engine.aclose()
    learner.close()


@pytest.mark.parametrize(("name", "caches"), [("gpt2", True), ("llava", True), ("gemma2", False)])
def test_keys_and_values_are_kept_where_every_layer_attends_to_everything(
    tmp_path: Path, name: str, caches: bool
) -> None:
    runner = open_runner(WRITERS[name](tmp_path / name))
    assert isinstance(runner, TransformersRunner)
    assert runner.caches is caches


async def test_a_placeholder_of_an_image_is_never_sampled(tmp_path: Path) -> None:
    model = WRITERS["llava"](tmp_path / "llava")
    asked = requests(model, 6, with_images=True, temperature=50.0, max_new_tokens=100)
    engine = EmbeddedEngine(open_runner(model))
    answers = await asyncio.gather(*map(engine.agenerate, asked))
    assert image_ids(model)[0] in asked[0].input_ids
    assert all(image_ids(model)[0] not in response.output_tokens for response in answers)
    await engine.aclose()
