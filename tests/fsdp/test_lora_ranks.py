"""Ranks train an adapter to the numbers of one process on every mesh, and its files go from one to the other."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from families import write_family
from family_rank import ADAMW, UNCLIPPED, family_batch
from lora_rank import SEED, STEPS, AdapterCase
from ranks_harness import MAX_TOKENS, opened_ranks
from test_families import launch

from areal.config.training import LoraConfig, OptimizerConfig
from areal.engine.model.live import LiveWeights
from areal.engine.models import open_runner
from areal.engine.training.engine import ScoringEngine, TrainingEngine
from areal.engine.training.lora import AdaptedModel
from areal.engine.training.supervised import mean_nll
from areal.engine.transformers.model import TransformersModel
from areal.engine.transformers.training import TransformersTraining

SECONDS = 600
CASES = [
    *(AdapterCase(family, backend) for family in ("Qwen3-tied", "Gemma2") for backend in ("fsdp:d2", "fsdp:t2")),
    AdapterCase("Llama-biased", "fsdp:t2"),
    AdapterCase("Qwen3Moe", "fsdp:t2"),
    AdapterCase("Qwen3", "fsdp:t2", head=True),
    AdapterCase("Qwen3-tied", "fsdp:t2", gradient_checkpointing=True),
    AdapterCase("Qwen3-tied", "fsdp:d2", gradient_checkpointing=True),
    AdapterCase("Qwen3-tied", "fsdp:d2", dtype="bfloat16"),
]
FOUR_RANKS = [AdapterCase("Qwen3-tied", "fsdp:d2t2")]


def one_process(directory: Path, lora: LoraConfig, optimizer: OptimizerConfig) -> TrainingEngine:
    model = AdaptedModel(TransformersTraining(TransformersModel(directory)), lora, seed=SEED, base_name="a model")
    return TrainingEngine(model, optimizer, total_steps=20, max_tokens_per_mb=MAX_TOKENS)


def write_expected(directory: Path, case: AdapterCase) -> None:
    """What one process makes of an adapter that changes a lot, and of a few steps from a new one."""
    once, often = one_process(directory, case.lora, UNCLIPPED), one_process(directory, case.lora, ADAMW)
    plain = ScoringEngine(TransformersTraining(TransformersModel(directory)))
    with torch.no_grad():
        once.flat += 0.1 * torch.randn(once.flat.shape, generator=torch.Generator().manual_seed(1))
    once.save(str(directory / f"begin-{case.head}"))
    expected = {"plain": plain.logprobs(family_batch(0)), "logprobs": once.logprobs(family_batch(0))}
    once.train_batch(family_batch(0), mean_nll)
    for step in range(STEPS):
        often.train_batch(family_batch(step), mean_nll)
    expected |= {"gradient": once.flat_grad, "weights": often.flat}
    torch.save(expected, directory / f"expected-{case.head}.pt")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for family, head in {(case.family, case.head): None for case in CASES + FOUR_RANKS}:
        if not (root / family).exists():
            write_family(family, root / family)
        write_expected(root / family, AdapterCase(family, "", head))
    return root


@pytest.fixture(scope="session")
def differences(adapters: Path) -> dict[AdapterCase, dict[str, float]]:
    found = {}
    for cases in (CASES, FOUR_RANKS):
        script = Path(__file__).with_name("lora_rank.py")
        largest = launch(script, cases[0].backend, [asdict(case) for case in cases], adapters)
        found |= dict(zip(cases, largest, strict=True))
    return found


def name_of(case: AdapterCase) -> str:
    return "-".join([case.family, case.backend, *(["head"] if case.head else [])])


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("case", [case for case in CASES + FOUR_RANKS if case.dtype == "float32"], ids=name_of)
def test_an_adapter_trains_as_in_one_process(
    case: AdapterCase, differences: dict[AdapterCase, dict[str, float]]
) -> None:
    found = differences[case]
    assert found["plain"] < 1e-5
    assert found["logprobs"] < 1e-5
    assert found["reference"] < 1e-5
    assert found["gradient"] < 1e-5
    assert found["weights"] < 1e-4
    assert found["resumed"] == 0


@pytest.mark.timeout(2 * SECONDS)
def test_half_precision_stays_near_single_precision(differences: dict[AdapterCase, dict[str, float]]) -> None:
    (found,) = [found for case, found in differences.items() if case.dtype == "bfloat16"]
    assert 1e-4 < found["logprobs"] < 0.1
    assert found["gradient"] < 1e-2


@pytest.mark.timeout(SECONDS)
def test_processes_publish_and_save_an_adapter_that_one_process_goes_on_with(adapters: Path, tmp_path: Path) -> None:
    directory, lora = adapters / "Qwen3-tied", AdapterCase("Qwen3-tied", "").lora
    with opened_ranks(directory, "fsdp:d2", tmp_path / "logs", lora=lora, path=str(directory)) as engine:
        engine.train_batch(family_batch(0), mean_nll)
        engine.version = 1
        update = engine.publish()
        assert update.layout == "adapter"
        assert [shard.name for shard in update.shards] == ["adapter_model.safetensors"]
        runner = open_runner(directory)
        weights = LiveWeights(runner)
        weights.swap(weights.stage(update))
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        engine.begin_checkpoint(checkpoint)()
        expected, without = (
            engine.logprobs(family_batch(1)),
            engine.without_adapter("reference").logprobs(family_batch(1)),
        )
        state = engine.state()
        engine.train_batch(family_batch(1), mean_nll)
        moved = engine.logprobs(family_batch(1))
        engine.load_checkpoint(checkpoint, state)
        assert torch.equal(engine.logprobs(family_batch(1)), expected)
    alone = one_process(directory, lora, ADAMW)
    alone.load_checkpoint(checkpoint, state)
    torch.testing.assert_close(alone.logprobs(family_batch(1)), expected, atol=1e-5, rtol=0)
    plain = ScoringEngine(TransformersTraining(TransformersModel(directory)))
    torch.testing.assert_close(plain.logprobs(family_batch(1)), without, atol=1e-5, rtol=0)
    assert float((moved - expected).abs().max()) > 1e-4
