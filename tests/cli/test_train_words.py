"""What `areal train` does before anything is started: `--demo`, `--dry-run`, and what it refuses."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from areal.cli.main import main
from areal.cli.train import DEMO
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests/engine/model_configs"
LARGE = MODELS / "qwen2.5-7b"
FAST = "workflow=areal.rollout.runners.online.OutsideAgent"
"""Loads no SDK."""


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A setting that names a model which fits everywhere; its shape alone is looked at."""
    values = json.loads((MODELS / "smollm2-135m/config.json").read_text())
    values |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    directory = tmp_path / "small"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    return f"actor.path={directory}"


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["train", "--demo", "--dry-run", FAST, *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_demo_is_the_example_and_in_the_package() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["areal"]
    assert DEMO.relative_to(ROOT / "areal").as_posix() in packed
    assert DEMO.read_bytes() == (ROOT / "examples/agent_workflow/config.yaml").read_bytes()
    config, _ = load_expr_config(["--config", str(DEMO)], GRPOConfig)
    assert config.actor.path == "builtin:tiny-math"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--demo", "--config", "x.yaml"], "--demo has a config of its own"),
        (["--demo", "--json"], "--json is for --dry-run"),
        ([], "areal train --demo"),
        (["--config", "none.yaml"], "cannot read the config file 'none.yaml'"),
    ],
)
def test_words_that_make_no_sense_end_with_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    assert said in capsys.readouterr().err


def test_plan_says_what_would_run_and_starts_nothing(
    small: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    code, shown, _ = dry_run(capsys, "output_dir=runs", "trial_name=one", small, "actor.device=cpu")
    said = " ".join(shown.split())
    assert code == 0
    assert "runs/sort-digits/one, new" in said
    assert "240 of 16 tasks × 8 episodes" in said
    assert '"answer": "0057"' in said
    assert "trainer, engine, 2 × rollout worker; on this machine" in said
    assert said.endswith("it fits nothing was started; without --dry-run it is")
    assert max(map(len, shown.splitlines())) <= 100
    assert not (tmp_path / "runs").exists()


def test_plan_of_a_builtin_model_does_not_make_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    code, shown, error = dry_run(capsys, "actor.path=builtin:tiny-math", "actor.device=cpu", "rollout.kernel=torch")
    assert (code, error) == (0, "")
    assert "builtin:tiny-math: qwen3 of 0.26M parameters, 8,192 positions" in " ".join(shown.split())
    assert not list(tmp_path.glob("cache/tiny-*"))


def test_plan_as_json_is_one_object(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = dry_run(capsys, "--json", small, "total_train_steps=7")
    planned = json.loads(shown)
    assert code == 0
    assert planned["steps"] == 7
    assert planned["run"] is None
    assert planned["processes"] == ["trainer", "engine", "rollout worker 0", "rollout worker 1"]
    assert planned["memory"]["host memory"]["bytes"] <= planned["memory"]["host memory"]["limit"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([FAST + "s"], "has no OutsideAgents"),
        (["train_dataset.path=builtin:sort-digit"], "no built-in task 'sort-digit'"),
        (["reward_fn=areal.reward.nothing"], "reward_fn 'areal.reward.nothing'"),
        (["actor.path=./nowhere"], "no model directory at './nowhere'"),
        ([f"actor.path={LARGE}", "rollout.gpus=99"], "needs 99 GPUs"),
        ([f"actor.path={LARGE}"], "does not fit"),
    ],
)
def test_run_that_could_not_start_ends_with_code_2_and_the_reason(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.engine.host_memory.os.sysconf", lambda name: 4096 if "SIZE" in name else 4 << 20)
    code, shown, error = dry_run(capsys, *words)
    assert (code, shown) == (2, "")
    assert said in error


def test_finished_run_is_refused_and_a_begun_one_goes_on(
    small: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "sort-digits/one"
    (run / "checkpoints/step-000080").mkdir(parents=True)
    shutil.copy(DEMO, run / "config.yaml")
    words = (f"output_dir={tmp_path}", "trial_name=one", small)
    assert "goes on from step 80" in " ".join(dry_run(capsys, *words)[1].split())
    assert "recover.mode=auto" in dry_run(capsys, *words, "recover.mode=off")[2]
    (run / "summary.json").write_text("{}")
    assert "is finished and is not overwritten" in dry_run(capsys, *words)[2]


INTERRUPTED_IMPORT = """
import sys


class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "numpy.matrixlib":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt


sys.meta_path.insert(0, Interrupting())
from areal.cli.main import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ctrl_c_is_not_lost_while_torch_loads(tmp_path: Path) -> None:
    """torch imports numpy and goes on without it whatever that raises, so a run would begin in spite of Ctrl-C."""
    words = ["train", "--demo", "total_train_steps=1", "valid_dataset.size=8", f"output_dir={tmp_path}"]
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (130, "areal: interrupted")
    assert not any(tmp_path.iterdir())
