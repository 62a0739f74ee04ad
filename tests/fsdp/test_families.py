"""Every family that ranks train gives the numbers of one process on every mesh, parameter by parameter."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_family
from family_rank import ADAMW, STEPS, UNCLIPPED, Case, family_batch
from ranks_harness import MAX_TOKENS
from safetensors.torch import load_file

from areal.api.engine_api import WeightShard, WeightUpdate
from areal.config.parallel import Ranks
from areal.config.training import OptimizerConfig
from areal.engine.model.live import LiveWeights
from areal.engine.model.published import whole_digest
from areal.engine.models import open_runner
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.head import token_logprobs
from areal.engine.training.supervised import mean_nll
from areal.engine.transformers.model import TransformersModel
from areal.engine.transformers.training import TransformersTraining

SECONDS = 900
"""For all comparisons of a process group, on a machine that does other things too."""
TWO_RANKS = [
    *(
        Case(family, backend, other)
        for family in FAMILIES
        for backend, other in (("fsdp:d2", "fsdp:t2"), ("fsdp:t2", "fsdp:d2"))
    ),
    Case("Qwen3-tied", "fsdp:t2", gradient_checkpointing=True),
    Case("Qwen3Moe", "fsdp:t2", gradient_checkpointing=True),
    Case("Mistral", "fsdp:d2", varlen=True),
    Case("Qwen3Moe", "fsdp:t2", varlen=True, gradient_checkpointing=True),
    Case("Qwen3-tied", "fsdp:d2", dtype="bfloat16"),
    Case("Qwen3-tied", "fsdp:t2", dtype="bfloat16"),
]
FOUR_RANKS = [
    *(Case(family, "fsdp:d2t2", "fsdp:d4") for family in ("Llama-biased", "Gemma2", "Qwen3Moe")),
    Case("Qwen3-tied", "fsdp:d2t2", dtype="bfloat16"),
]


def one_process(directory: Path, optimizer: OptimizerConfig) -> TrainingEngine:
    model = TransformersTraining(TransformersModel(directory, trainable=True))
    return TrainingEngine(model, optimizer, total_steps=20, max_tokens_per_mb=MAX_TOKENS)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each family's model, and what one process makes of it."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        directory = write_family(family, root / family)
        once, often = one_process(directory, UNCLIPPED), one_process(directory, ADAMW)
        expected = {
            "logprobs": once.logprobs(family_batch(0)),
            "loss": once.train_batch(family_batch(0), mean_nll)["loss"],
        }
        for step in range(STEPS):
            often.train_batch(family_batch(step), mean_nll)
        expected["gradient"] = {name: each.grad for name, each in once.model.model.module.named_parameters()}
        expected["weights"] = {name: each.detach() for name, each in often.model.model.module.named_parameters()}
        torch.save(expected, directory / "expected.pt")
    return root


def run_ranks(cases: Sequence[Case], directory: Path) -> dict[Case, dict[str, float]]:
    script = Path(__file__).with_name("family_rank.py")
    found = launch(script, cases[0].backend, [asdict(case) for case in cases], directory)
    return dict(zip(cases, found, strict=True))


def launch(script: Path, backend: str, cases: Sequence[dict[str, Any]], directory: Path) -> list[dict[str, float]]:
    """The largest difference of any rank, for each case that a script is given."""
    count = Ranks.parse(backend).count
    order = json.dumps({"directory": str(directory), "cases": cases})
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), order],
            env=env,
            stdout=(directory / f"output-{count}-{rank}.txt").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(count)
    ]
    try:
        codes = [rank.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    printed = [(directory / f"output-{count}-{rank}.txt").read_text()[-3000:] for rank in range(count)]
    assert codes == [0] * count, "\n".join(printed)
    found = [json.loads((directory / f"found-{count}-{rank}.json").read_text()) for rank in range(count)]
    return [{name: max(each[name] for each in of) for name in of[0]} for of in zip(*found, strict=True)]


@pytest.fixture(scope="session")
def differences(models: Path) -> dict[Case, dict[str, float]]:
    return run_ranks(TWO_RANKS, models) | run_ranks(FOUR_RANKS, models)


def name_of(case: Case) -> str:
    return f"{case.family}-{case.backend}"


WHOLE = [case for case in TWO_RANKS + FOUR_RANKS if case.other_backend]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("case", WHOLE, ids=name_of)
def test_family_trains_as_in_one_process(case: Case, differences: dict[Case, dict[str, float]]) -> None:
    found = differences[case]
    assert found["logprobs"] < 1e-5
    assert found["gradient"] < 1e-5
    assert found["weights"] < 1e-4
    assert found["resumed"] < 1e-5


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("case", WHOLE, ids=name_of)
def test_engine_takes_what_ranks_publish(case: Case, models: Path, differences: dict[Case, dict[str, float]]) -> None:
    published = models / case.family / f"published-{case.backend}"
    shards = sorted(
        (WeightShard(**each) for each in json.loads((published / "shards.json").read_text())),
        key=lambda each: each.name,
    )
    runner = open_runner(models / case.family, with_weights=False)
    update = WeightUpdate(0, whole_digest(shards), str(published / "0"), tuple(shards))
    weights = LiveWeights(runner)
    weights.swap(weights.stage(update))
    batch, expected = family_batch(STEPS), torch.load(published / "logprobs.pt")
    ends = torch.tensor([len(span.asked) for span in batch.spans]).cumsum(0) - 1
    logits = runner.prefill(range(len(batch.spans)), [span.ids[:-1].tolist() for span in batch.spans])
    targets = torch.tensor([span.ids[-1] for span in batch.spans])
    found = token_logprobs(logits, targets, batch.temperatures[ends])
    torch.testing.assert_close(found, expected[ends], atol=1e-4, rtol=0)


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("case", WHOLE, ids=name_of)
def test_checkpoint_has_the_names_of_the_files(
    case: Case, models: Path, differences: dict[Case, dict[str, float]]
) -> None:
    directory = models / case.family
    checkpoint = directory / f"checkpoint-{case.backend}"
    names = {name for path in checkpoint.glob("*.safetensors") for name in load_file(path)}
    assert names == set(load_file(directory / "model.safetensors"))
    expected = torch.load(directory / f"published-{case.backend}/logprobs.pt")
    torch.testing.assert_close(
        one_process(checkpoint, ADAMW).logprobs(family_batch(STEPS)), expected, atol=1e-5, rtol=0
    )


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("option", ["gradient_checkpointing", "varlen"])
def test_gradient_is_the_same_however_it_is_computed(option: str, differences: dict[Case, dict[str, float]]) -> None:
    found = [found for case, found in differences.items() if getattr(case, option)]
    assert len(found) > 1
    assert all(each["logprobs"] < 1e-5 and each["gradient"] < 1e-5 for each in found)


@pytest.mark.timeout(2 * SECONDS)
def test_half_precision_stays_near_single_precision(differences: dict[Case, dict[str, float]]) -> None:
    """A thousandth of the loss. That it is used shows in the log-probs."""
    found = [found for case, found in differences.items() if case.dtype == "bfloat16"]
    assert len(found) == 3
    assert all(each["loss"] < 5e-3 and 1e-4 < each["logprobs"] < 0.1 and each["gradient"] < 1e-2 for each in found)
