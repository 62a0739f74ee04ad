from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import DPOConfig, GRPOConfig, RewardConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.rollout.loading import WorkflowSpec, check, import_object

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("examples/**/config.yaml"))
ON_PAIRS = {"dpo": DPOConfig, "reward_model": RewardConfig}
"""Examples whose pairs are made by a script first."""
MADE_FIRST = {"search_agent": "runs/search-agent-warm-up/", "smollm2": "models/"}
"""Examples whose model and tasks are made by scripts first, and where."""
TASKS_MADE_FIRST = {*MADE_FIRST, "harbor_tasks"}
LIBRARIES = {"reasoning-gym:": "reasoning_gym", "verifiers:": "verifiers"}
"""By how the path of a dataset begins: what reads it, in an environment of its own (`make test-environments`)."""


def test_there_is_an_example_config() -> None:
    assert ROOT / "examples/agent_workflow/config.yaml" in CONFIGS


def kind_of(path: Path) -> Any:
    return ON_PAIRS.get(path.parent.name, GRPOConfig)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_example_config_loads_and_fits_a_screen(path: Path) -> None:
    config, _ = load_expr_config(["--config", str(path), "scheduler.type=local", "seed=2"], kind_of(path))
    assert config.seed == 2
    assert len(path.read_text().splitlines()) <= 40


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_example_config_names_what_is_there(path: Path) -> None:
    from areal.engine.models import BUILTIN  # here, because it loads torch

    config, _ = load_expr_config(["--config", str(path), "train_dataset.size=1", "valid_dataset.size=1"], kind_of(path))
    if path.parent.name in MADE_FIRST:
        assert config.actor.path.startswith(MADE_FIRST[path.parent.name])
    else:
        assert config.actor.path.removeprefix("builtin:") in BUILTIN
    if path.parent.name in ON_PAIRS:
        return
    for prefix, library in LIBRARIES.items():
        if config.train_dataset.path.startswith(prefix):
            pytest.importorskip(library)
    check(WorkflowSpec(config.workflow, {"reward_fn": config.reward_fn} if config.reward_fn else {}))
    if config.reward_fn:
        assert callable(import_object(config.reward_fn, "reward_fn"))
    if path.parent.name in TASKS_MADE_FIRST:
        return
    assert get_custom_dataset(split="train", dataset_config=config.train_dataset)
    assert get_custom_dataset(split="test", dataset_config=config.valid_dataset)
