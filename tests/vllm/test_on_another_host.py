"""vLLM on a host that has neither the model nor the trainer's memory: it starts without weights, which come when they
are published. That host is a mount namespace with a shared memory of its own; it needs root."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_kinds import ask
from runs_on_vllm import running
from test_agreement import recomputed
from test_vllm_engine import TOLERANCE, logprobs_of
from tiny_models import write_model
from vllm_engines import PYTHON

from areal.config.training import OptimizerConfig, SchedulerConfig
from areal.engine.model.architecture import read_architecture
from areal.engine.training.engine import TrainingEngine
from areal.infra.rpc.sockets import address_towards
from areal.infra.scheduler import LAUNCHERS
from benchmarks.weight_update import OUTSIDE, ApartLauncher

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """In shared memory, so that the other host does not have it."""
    with tempfile.TemporaryDirectory(prefix="areal-test-", dir="/dev/shm") as place:
        yield Path(shutil.copytree(write_model(tmp_path / "model", head_dim=32), Path(place) / "model"))


async def test_vllm_starts_without_weights_where_the_model_is_not_and_fetches_them(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAUNCHERS, "apart", lambda config: ApartLauncher())
    apart = replace(SchedulerConfig(), type="apart", address=address_towards(OUTSIDE))  # type: ignore[arg-type]
    trainer = TrainingEngine(read_architecture(model), OptimizerConfig(), total_steps=1, directory=model)
    trainer.version = 1
    settings: dict[str, Any] = {"backend": "vllm", "python": str(PYTHON), "engine_args": ["--enforce-eager"]}
    try:
        async with running(model, tmp_path / "logs", apart, **settings) as run:
            assert "'load_format': 'dummy'" in (tmp_path / "logs" / "engine.log").read_text()
            run.shipper.published = update = trainer.publish()
            await asyncio.wait_for(run.engines.publish(update), 120)
            asked = [ask(seed=seed, max_new_tokens=20) for seed in range(4)]
            answers = await asyncio.wait_for(asyncio.gather(*map(run.worker.agenerate, asked)), 120)
        assert {digest for each in answers for digest in each.digests.values()} == {update.digest}
        differences = (recomputed(trainer, asked, answers) - logprobs_of(answers)).abs()
        print(f"log-probs of vLLM and of the trainer differ by {differences.max():.1e} at most")
        assert differences.max() < TOLERANCE
    finally:
        trainer.close()
