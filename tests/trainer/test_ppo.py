"""Whole runs of the trainer on a fleet without processes: what they write down, and how they go on."""

from pathlib import Path

import pytest
from fleet_of_groups import FleetOfGroups, ppo_config, run, save_model
from small_runs import make_engine

from areal.api.errors import EngineError
from areal.trainer.logs import read_lines, read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", make_engine())


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_lines(path)]


def test_a_step_whose_weights_could_not_be_published_is_written_down_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = ppo_config(tmp_path, model), tmp_path / "test/one"
    with pytest.raises(EngineError, match="refuses the weights"):
        run(config, monkeypatch, FleetOfGroups(fails_at=2))
    assert (run_dir / "checkpoints/step-000002").is_dir()
    assert steps_in(run_dir / "metrics.jsonl") == [1, 2]
    assert steps_in(run_dir / "rollouts.jsonl") == [1] * 8 + [2] * 8
    again = FleetOfGroups()
    run(config, monkeypatch, again)
    assert again.taken == [4, 5, 6, 7]
    assert steps_in(run_dir / "metrics.jsonl") == [1, 2, 3, 4]
    assert steps_in(run_dir / "rollouts.jsonl") == [step for step in (1, 2, 3, 4) for _ in range(8)]
    tasks = [row["task_id"] for row in read_lines(run_dir / "rollouts.jsonl")]
    assert tasks == [task for task in range(8) for _ in range(4)]
    assert all("step_seconds" in row for row in read_metrics(run_dir))
