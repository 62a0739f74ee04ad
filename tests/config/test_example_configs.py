from pathlib import Path

import pytest

from areal.api.cli_args import GRPOConfig, load_expr_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("examples/**/config.yaml"))


def test_there_is_an_example_config() -> None:
    assert ROOT / "examples/agent_workflow/config.yaml" in CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_example_config_loads_and_fits_a_screen(path: Path) -> None:
    config, _ = load_expr_config(["--config", str(path), "scheduler.type=local", "seed=2"], GRPOConfig)
    assert config.seed == 2
    assert len(path.read_text().splitlines()) <= 40
