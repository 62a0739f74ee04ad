"""How vLLM is given adapters, against a stand-in for its routes: what it is asked, in which order. With vLLM itself:
tests/vllm/test_adapters_on_vllm.py."""

from pathlib import Path

import pytest
from fake_vllm_server import FakeVllm, fake
from tiny_models import write_model

from areal.api.engine_api import WeightUpdate
from areal.api.errors import EngineError
from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters, RolloutConfig
from areal.config.training import LoraConfig, OptimizerConfig
from areal.engine.inference.http_server import HttpServer
from areal.engine.inference.vllm import ADAPTER, VllmEngine
from areal.engine.models import open_adapted
from areal.engine.training.engine import TrainingEngine
from areal.trainer.engines import with_adapters

__all__ = ["fake"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


def publish(model: Path) -> tuple[TrainingEngine, WeightUpdate]:
    adapted = open_adapted(model, LoraConfig(rank=2), name="m", seed=1)
    engine = TrainingEngine(adapted, OptimizerConfig(), total_steps=1)
    return engine, engine.publish()


async def test_an_adapter_is_named_once_and_replaced_in_the_workers(fake: tuple[FakeVllm, str], model: Path) -> None:
    server, url = fake
    engine = await VllmEngine.join(HttpServer("vLLM", url), model)
    trainer, _ = publish(model)
    for version in range(3):
        trainer.version = version
        update = trainer.publish()
        await engine.update_weights(update)
        health = await engine.health()
        assert (health.version, health.digest) == (version, update.digest)
    (named,) = server.bodies("/v1/load_lora_adapter")
    assert named["lora_name"] == ADAPTER
    loads = [body for body in server.bodies("/collective_rpc") if body["method"] == "load_published_adapter"]
    assert [Path(body["kwargs"]["path"]).name for body in loads] == ["0", "1", "0"]
    paths = [path for path, _ in server.asked]
    assert paths.count("/reset_prefix_cache") == 3, "what was computed with the adapter before is not used again"
    answer = await engine.agenerate(ModelRequest("r", [1, 2], GenerationHyperparameters(max_new_tokens=1)))
    assert (answer.output_tokens, answer.output_versions) == ([7], [2])
    assert server.bodies("/inference/v1/generate")[-1]["model"] == ADAPTER
    await engine.aclose()
    trainer.close()


async def test_a_host_that_fetched_the_shard_alone_has_its_config_too(fake: tuple[FakeVllm, str], model: Path) -> None:
    engine = await VllmEngine.join(HttpServer("vLLM", fake[1]), model)
    trainer, update = publish(model)
    config = Path(update.path) / "adapter_config.json"
    expected = config.read_text()
    config.unlink()
    await engine.update_weights(update)
    assert config.read_text() == expected
    await engine.aclose()
    trainer.close()


@pytest.mark.parametrize("fake", [False], indirect=True)
async def test_a_server_that_takes_no_adapters_is_told_how_to_start(fake: tuple[FakeVllm, str], model: Path) -> None:
    engine = await VllmEngine.join(HttpServer("vLLM", fake[1]), model)
    trainer, update = publish(model)
    with pytest.raises(EngineError, match=r"vLLM must take adapters: .*404.*--enable-lora.*VLLM_ALLOW_RUNTIME_LORA"):
        await engine.update_weights(update)
    await engine.aclose()
    trainer.close()


def test_vllm_is_started_for_the_adapters_rank() -> None:
    rollout = RolloutConfig(backend="vllm", engine_args=["--enforce-eager"])
    started = with_adapters(rollout, LoraConfig(rank=9)).engine_args
    assert started == ["--enable-lora", "--max-lora-rank", "16", "--enforce-eager"]
    for same in (rollout, RolloutConfig()):
        assert with_adapters(same, LoraConfig()) is same
    assert with_adapters(rollout, LoraConfig(rank=512)).engine_args[2] == "512"
