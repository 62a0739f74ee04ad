"""LoRA adapters are published, checked and swapped like whole models, and always added to the whole model."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_adapters import low_rank, merge_by_hand
from tiny_models import training_engine, write_model
from torch import Tensor
from transformers_models import batch, requests, sampled, trainer, write_gemma2, write_gpt2

import areal.engine.inference.engine as embedded
from areal.api.engine_api import WeightUpdate
from areal.api.errors import ModelError, WeightMismatch
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.model.adapter import AdapterConfig, LowRank, adapter_writer, base_digest
from areal.engine.models import open_runner
from areal.engine.training.engine import TrainingEngine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = AdapterConfig(r=4, lora_alpha=8, target_modules=("q_proj", "v_proj"))
ALL = AdapterConfig(r=3, lora_alpha=1.5, target_modules=EVERYTHING)
WITH_HEAD = AdapterConfig(r=2, lora_alpha=2, target_modules=(*EVERYTHING, "lm_head"))
TOLERANCE = 2e-5

Publish = Callable[..., WeightUpdate]


def write_llama(directory: Path) -> Path:
    return write_model(directory, family="llama", tied_embeddings=False)


MODELS: dict[str, tuple[Callable[[Path], Path], list[AdapterConfig]]] = {
    "qwen3": (write_model, [ATTENTION, ALL]),
    "llama": (write_llama, [ALL, WITH_HEAD]),
    "gemma2": (write_gemma2, [ATTENTION, ALL]),  # which transformers computes
}


@pytest.fixture
def publish(tmp_path: Path) -> Publish:
    """Publishes an adapter to a model, each from a directory of its own."""

    def write(base: TrainingEngine, config: AdapterConfig, layers: dict[str, LowRank], version: int) -> WeightUpdate:
        place = tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}"
        place.mkdir()
        return adapter_writer(place, config, layers, base.model.named_weights()).write(version)

    return write


async def logprob_difference(engine: EmbeddedEngine, model: Path, judge: TrainingEngine) -> float:
    """Between what the engine reports of tokens that it draws and what the trainer computes."""
    asked = requests(model, 6, with_images=False)
    answers = await asyncio.gather(*map(engine.agenerate, asked))
    return float((judge.logprobs(batch(asked, answers)) - sampled(answers)).abs().max())


@pytest.fixture(params=MODELS, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[AdapterConfig]]:
    write, configs = MODELS[request.param]
    return write(tmp_path_factory.mktemp("models") / request.param), configs


async def test_an_adapter_gives_the_log_probs_of_a_model_that_was_merged_by_hand(
    case: tuple[Path, list[AdapterConfig]], publish: Publish
) -> None:
    model, configs = case
    engine = EmbeddedEngine(open_runner(model))
    base = trainer(model)
    assert await logprob_difference(engine, model, base) < TOLERANCE
    for version, config in enumerate(configs, 1):
        layers = low_rank(base, config, seed=version)
        judge = trainer(model)
        merge_by_hand(judge, config, layers)
        update = publish(base, config, layers, version)
        await engine.stage_weights(update)
        assert (await engine.health()).version == version - 1
        await engine.update_weights(update)
        health = await engine.health()
        assert (health.version, health.digest) == (version, update.digest)
        assert await logprob_difference(engine, model, judge) < TOLERANCE
        assert await logprob_difference(engine, model, base) > 100 * TOLERANCE
    await engine.aclose()


async def test_an_adapter_to_the_built_in_model(tiny_math: Path, publish: Publish) -> None:
    engine, base, judge = EmbeddedEngine(open_runner(tiny_math)), trainer(tiny_math), trainer(tiny_math)
    layers = low_rank(base, ALL, seed=1)
    merge_by_hand(judge, ALL, layers)
    await engine.update_weights(publish(base, ALL, layers, 1))
    assert await logprob_difference(engine, tiny_math, judge) < TOLERANCE
    await engine.aclose()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def base(model: Path) -> Iterator[TrainingEngine]:
    engine = trainer(model)
    yield engine
    engine.close()


class Opened:
    def __init__(self, model: Path, **options: Any) -> None:
        self.runner = open_runner(model, **options)
        self.engine = EmbeddedEngine(self.runner)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.runner.named_weights()}


@pytest.fixture
async def opened(model: Path) -> AsyncIterator[Opened]:
    opened = Opened(model)
    yield opened
    await opened.engine.aclose()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("small", [True, False])
async def test_adapters_that_follow_each_other_leave_nothing_behind(
    opened: Opened, base: TrainingEngine, publish: Publish, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those after a hundred others are, bit by bit, what they are alone; layers that only one targets go back."""
    if not small:
        monkeypatch.setattr(embedded, "SMALL_WEIGHTS_BYTES", 0)  # staged in a thread
    nothing = {layer: (a, torch.zeros_like(b)) for layer, (a, b) in low_rank(base, ATTENTION, 0).items()}
    start = opened.weights()
    first = publish(base, ALL, low_rank(base, ALL, seed=1), 1)
    await opened.engine.update_weights(first)
    once = opened.weights()
    assert not equal(once, start)
    matrices = low_rank(base, ATTENTION, seed=2)
    updates = [publish(base, ATTENTION, matrices, 2), publish(base, ALL, low_rank(base, ALL, seed=3), 3)]
    for _ in range(50):
        for update in updates:
            await opened.engine.update_weights(update)
    await opened.engine.update_weights(first)
    assert equal(opened.weights(), once)
    await opened.engine.update_weights(publish(base, ATTENTION, nothing, 4))
    assert equal(opened.weights(), start)


async def test_the_next_version_of_an_adapter_is_read_from_its_own_matrices(
    opened: Opened, base: TrainingEngine, tmp_path: Path
) -> None:
    layers = low_rank(base, ALL, seed=1)
    writer = adapter_writer(tmp_path, ALL, layers, base.model.named_weights())
    await opened.engine.update_weights(writer.write(1))
    for a, b in layers.values():
        a.mul_(0.5)
        b.add_(0.1)
    await opened.engine.update_weights(writer.write(2))
    judge = training_engine(base.decoder.architecture)
    judge.flat.copy_(base.flat.detach())
    merge_by_hand(judge, ALL, layers)
    for name, weight in judge.model.named_weights():
        torch.testing.assert_close(opened.weights()[name], weight.detach(), atol=1e-6, rtol=1e-6)


async def test_a_whole_model_after_an_adapter_is_what_the_next_adapter_is_added_to(
    opened: Opened, model: Path, base: TrainingEngine, publish: Publish
) -> None:
    old = publish(base, ALL, low_rank(base, ALL, seed=1), 1)
    await opened.engine.update_weights(old)
    base.flat.mul_(1.1)
    base.version = 2
    await opened.engine.update_weights(base.publish())
    assert await logprob_difference(opened.engine, model, base) < TOLERANCE
    assert equal(opened.weights(), {name: tensor.detach() for name, tensor in base.model.named_weights()})
    with pytest.raises(
        WeightMismatch, match=r"adapter of version 1 belongs to a model with the digest .* publish that"
    ):
        await opened.engine.update_weights(old)
    layers = low_rank(base, ATTENTION, seed=2)
    await opened.engine.update_weights(publish(base, ATTENTION, layers, 3))
    merge_by_hand(base, ATTENTION, layers)
    assert await logprob_difference(opened.engine, model, base) < TOLERANCE


async def test_an_adapter_that_was_staged_before_a_whole_model_is_not_swapped_in_as_it_was(
    opened: Opened, base: TrainingEngine, publish: Publish
) -> None:
    adapter = publish(base, ALL, low_rank(base, ALL, seed=1), 1)
    await opened.engine.stage_weights(adapter)
    staged = opened.engine._staged
    base.flat.mul_(1.1)
    base.version = 2
    await opened.engine.update_weights(base.publish())
    opened.engine._staged = staged  # as if a thread had been done with it only now
    with pytest.raises(WeightMismatch, match="belongs to a model with the digest"):
        await opened.engine.update_weights(adapter)


async def test_running_requests_go_on_under_an_adapter(opened: Opened, base: TrainingEngine, publish: Publish) -> None:
    (asked,) = requests(Path(), 1, with_images=False, max_new_tokens=60)
    versions: list[int] = []
    async for chunk in opened.engine.astream(asked):
        versions += chunk.versions
        if len(versions) == 5:
            await opened.engine.update_weights(publish(base, ALL, low_rank(base, ALL, seed=1), 1))
    assert sorted(set(versions)) == [0, 1]
    assert versions == sorted(versions)


async def test_a_damaged_adapter_is_refused_and_changes_nothing(
    opened: Opened, base: TrainingEngine, publish: Publish
) -> None:
    update = publish(base, ALL, low_rank(base, ALL, seed=1), 1)
    file = Path(update.path) / "adapter_model.safetensors"
    whole, before = file.read_bytes(), opened.weights()
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    for damaged in (bytes(flipped), whole.replace(b"1.5", b"9.5"), whole[:-4] + b"\0" * 4):
        assert damaged != whole
        file.write_bytes(damaged)
        with pytest.raises(WeightMismatch, match=r"adapter_model\.safetensors of version 1 .* must have the digest"):
            await opened.engine.update_weights(update)
    with pytest.raises(WeightMismatch, match=r"version 1 in .* must have the digest 0{32}, got "):
        await opened.engine.update_weights(replace(update, digest="0" * 32))
    assert equal(opened.weights(), before)
    assert (await opened.engine.health()).version == 0
    file.write_bytes(whole)
    await opened.engine.update_weights(update)
    assert (await opened.engine.health()).version == 1


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"layers": {Q: (torch.zeros(4, 16), torch.zeros(31, 4))}},
            rf"must have base_model\.model\.{Q}\.lora_B\.weight with the shape \[32, 4\], got the shape \[31, 4\]",
        ),
        (
            {"layers": {Q: (torch.zeros(5, 16), torch.zeros(32, 5))}},
            rf"{Q}\.lora_A\.weight with the shape \[4, 16\], got the shape \[5, 16\]; it has r=4",
        ),
        ({"without": Q}, rf"{Q}\.lora_A\.weight with the shape \[4, 16\], got no such tensor"),
        (
            {"layers": {"model.layers.1.mlp.up_proj": (torch.zeros(4, 16), torch.zeros(32, 4))}},
            r"has base_model\.model\.model\.layers\.1\.mlp\.up_proj\.lora_A\.weight, which belongs to none",
        ),
        (
            {"layers": {"model.layers.7.self_attn.q_proj": (torch.zeros(4, 16), torch.zeros(32, 4))}},
            r"has base_model\.model\.model\.layers\.7\..* in this model",
        ),
        (
            {"target_modules": ("q_proj", "v_proj", "query_key_value")},
            r"targets query_key_value, which is no linear layer here; these are down_proj, gate_proj, .* v_proj",
        ),
        ({"target_modules": ("q_proj", "v_proj", "embed_tokens")}, "targets embed_tokens, which is no linear layer"),
    ],
)
async def test_an_adapter_that_does_not_fit_the_model_is_refused_by_name(
    opened: Opened, base: TrainingEngine, publish: Publish, change: dict[str, Any], complaint: str
) -> None:
    layers = low_rank(base, ATTENTION, seed=1)
    layers.pop(change.get("without", ""), None)
    layers |= change.get("layers", {})
    config = replace(ATTENTION, target_modules=change.get("target_modules", ATTENTION.target_modules))
    before = opened.weights()
    with pytest.raises(
        WeightMismatch, match=rf"the adapter of version 1 {complaint}|version 1 must have .*{complaint}"
    ):
        await opened.engine.update_weights(publish(base, config, layers, 1))
    assert equal(opened.weights(), before)


async def test_an_adapter_of_another_model_is_refused(
    opened: Opened, base: TrainingEngine, publish: Publish, model: Path
) -> None:
    base.flat.mul_(1.02)
    update = publish(base, ALL, low_rank(base, ALL, seed=1), 1)
    with pytest.raises(WeightMismatch, match=r"a model with the digest .* start the engine with the trainer"):
        await opened.engine.update_weights(update)
    without = Opened(model, with_weights=False)
    with pytest.raises(WeightMismatch, match="belongs to a model with the digest"):
        await without.engine.update_weights(update)
    await without.engine.aclose()


async def test_a_whole_model_that_says_it_is_an_adapter_is_refused(opened: Opened, base: TrainingEngine) -> None:
    with pytest.raises(WeightMismatch, match=r"version 0 must have adapter_config and base_digest in its metadata"):
        await opened.engine.update_weights(replace(base.publish(), layout="adapter"))


def test_transposed_matrices_are_no_linear_layers(tmp_path: Path) -> None:
    """GPT-2 keeps them as [in, out]; square ones would be changed wrongly."""
    assert dict(open_runner(write_gpt2(tmp_path / "gpt2")).linear_weights()) == {}


def test_a_model_has_one_digest_in_both_precisions() -> None:
    weights = [("a", torch.randn(5, 3)), ("b", torch.randn(4))]
    assert base_digest(weights) == base_digest([(name, tensor.bfloat16()) for name, tensor in reversed(weights)])
    assert base_digest(weights) != base_digest([("a", weights[0][1]), ("c", weights[1][1])])


def test_a_published_adapter_has_pefts_files_names_and_fields(base: TrainingEngine, publish: Publish) -> None:
    update = publish(base, ATTENTION, low_rank(base, ATTENTION, seed=1), 1)
    assert [shard.name for shard in update.shards] == ["adapter_model.safetensors"]
    assert update.layout == "adapter"
    text = (Path(update.path) / "adapter_config.json").read_text()
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    assert json.loads(text) == fields | {"target_modules": ["q_proj", "v_proj"]}
    assert AdapterConfig.from_json(text) == ATTENTION
    with safe_open(Path(update.path) / "adapter_model.safetensors", "pt") as file:
        assert set(file.keys()) == {
            f"base_model.model.model.layers.{index}.self_attn.{layer}.lora_{matrix}.weight"
            for index in range(2)
            for layer in ("q_proj", "v_proj")
            for matrix in "AB"
        }
        assert file.metadata()["adapter_config"] == text


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"r": 0}, "r must be an integer >= 1, got 0"),
        ({"r": "8"}, "r must be an integer >= 1, got '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number, got nan"),
        ({"target_modules": "all-linear"}, "must have a list of target_modules"),
        ({"target_modules": []}, "target_modules must be names of layers"),
        ({"use_dora": True}, "use_dora=True is not computed here; leave use_dora at its default"),
        ({"use_rslora": True}, "use_rslora=True is not computed"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*lm_head.* is not computed"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=.* is not computed"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not computed"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not computed"),
        ({"a_later_field": 1}, "a_later_field=1 is not computed"),
    ],
)
def test_adapters_that_compute_something_else_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        AdapterConfig.from_json(json.dumps(json.loads(ALL.to_json()) | change))
