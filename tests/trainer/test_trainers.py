"""What a user may get wrong is refused before torch loads, and the first line is there before that."""

import io
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from areal import PPOTrainer
from areal.api.errors import ArealError, ConfigError, DatasetError, ModelError, WorkflowError
from areal.config.experiment import GRPOConfig

TASKS = [{"messages": [{"role": "user", "content": "Sort 21"}], "answer": "12"}] * 32


def score(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: object) -> float:
    return 1.0


def config(tmp_path: Path) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), experiment_name="early", total_train_steps=3)


class NeedsReward:
    def __init__(self, reward_fn: object) -> None:
        self.reward_fn = reward_fn

    async def run(self, data: object, **extra_kwargs: object) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("workflow", "kwargs", "reward_fn", "message"),
    [
        ("no_such_module.Agent", {}, "", "workflow 'no_such_module.Agent' cannot be imported: ModuleNotFoundError"),
        ("areal.workflow.openai.math_agent.MathAgnt", {}, "", "has no MathAgnt; it has MathAgent"),
        (NeedsReward, {}, "", "missing a required argument: 'reward_fn'.* or set reward_fn in the config"),
        (NeedsReward, {}, "areal.reward.no_such_reward", "reward_fn 'areal.reward.no_such_reward'"),
        (NeedsReward, {"colour": "red"}, f"{__name__}.score", "unexpected keyword argument 'colour'"),
    ],
)
def test_wrong_workflow_is_refused_before_the_work_begins(
    tmp_path: Path, workflow: object, kwargs: dict[str, str], reward_fn: str, message: str
) -> None:
    settings = config(tmp_path)
    settings.reward_fn = reward_fn
    with PPOTrainer(settings, TASKS) as trainer, pytest.raises(WorkflowError, match=message):
        trainer.train(workflow=workflow, workflow_kwargs=kwargs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("section", ["actor", "ref", "critic"])
@pytest.mark.parametrize("path", ["builtin:huge", "/nowhere/model", "./model"])
def test_model_that_is_not_there_is_refused_by_the_constructor(tmp_path: Path, section: str, path: str) -> None:
    settings = config(tmp_path)
    getattr(settings, section).path = path
    with pytest.raises(ModelError, match=r"no (built-in model|model directory)"):
        PPOTrainer(settings, TASKS)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="it has its vLLM in this environment")
def test_engine_that_is_not_installed_is_refused_by_the_constructor(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.rollout.backend = "vllm:d2"
    with pytest.raises(ConfigError, match=r"rollout.backend=vllm:d2 needs vLLM, .* set rollout.python=PATH"):
        PPOTrainer(settings, TASKS)
    settings.rollout.python = "/opt/vllm/bin/python"
    PPOTrainer(settings, TASKS)


def test_reward_function_that_nobody_is_given_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Rewarding:
        async def run(self, data: object, **extra_kwargs: object) -> float:
            return 0.0

    settings = config(tmp_path)
    settings.reward_fn, settings.rollout.device = f"{__name__}.score", "cuda:99"
    with PPOTrainer(settings, TASKS) as trainer, pytest.raises(ArealError, match=r"rollout\.device"):
        trainer.train(workflow=Rewarding)
    assert "Rewarding takes no reward_fn" in caplog.text


def test_wrong_tasks_are_refused_by_the_constructor(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot read tasks from"):
        PPOTrainer(config(tmp_path), tmp_path / "nothing.jsonl")


def test_first_line_says_what_begins_unless_the_run_is_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path)
    PPOTrainer(settings, TASKS)
    assert capsys.readouterr().err == "areal 0.1.0 · early · builtin:tiny-math · 3 steps of 32 × 8 episodes\n"
    settings.quiet = True
    PPOTrainer(settings, TASKS)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_first_line_is_broken_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", Terminal())
    PPOTrainer(config(tmp_path), TASKS)
    assert sys.stderr.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "areal 0.1.0 · early · builtin:tiny-math",
        "  · 3 steps of 32 × 8 episodes",
    ]


SCRIPT = """
import sys
from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig
from areal.api.errors import WorkflowError

with PPOTrainer(GRPOConfig(), [{"messages": []}] * 32) as trainer:
    try:
        trainer.train(workflow="typo.Agent")
    except WorkflowError:
        heavy = {"torch", "numpy", "transformers"} & set(sys.modules)
        assert not heavy, heavy
    else:
        raise AssertionError("a wrong workflow was taken")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["-c", SCRIPT],
        ["-X", "importtime", "-m", "areal.cli.main", "train", "train_dataset.path=builtin:sums", "workflow=typo.Agent"],
    ],
    ids=["script", "command"],
)
def test_script_and_command_refuse_a_wrong_workflow_without_torch(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert lines[0].startswith("areal 0.1.0 · experiment · builtin:tiny-math")
    assert not {"torch", "numpy"} & {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == (0 if "-c" in words else 2), done.stderr
    assert ArealError.__name__ not in done.stderr
