"""What a reader of the documentation has: the files that the pages tell of, from the pages themselves, and runs."""

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from page_snippets import ROOT, snippets

from areal import SFTTrainer
from areal.api.cli_args import SFTConfig, load_expr_config
from areal.cli.main import main

TASK_LINE = json.dumps({"messages": [{"role": "user", "content": "Sort 5291"}], "answer": "1259"}) + "\n"
TASK_FILES = ("tasks.jsonl", "held_out.jsonl", "sample.jsonl", "test.jsonl")
OF_A_CLONE = ("examples", "deploy", "realhf", "pyproject.toml")
MODELS = ("DIR", "MODEL", "path/to/model")
"""Where pages say that a model is."""
RUN = re.compile(r"runs/([\w-]+)/([\w-]+)")
CHECKPOINT = re.compile(r"(runs/[\w-]+/[\w-]+)/checkpoints/(step-\d+)")
MY_MODULE = """
from areal.workflow import RLVRWorkflow as MyWorkflow
my_reward = digits_reward
"""


class ReadersPlace:
    """A directory in which what the pages print can be run."""

    def __init__(self, directory: Path, model: Path, run: Callable[[str], Path]) -> None:
        """`run` gives a finished one for an experiment's name, which is copied to where a page says that one is."""
        self.directory = directory
        self._run = run
        printed = {each.name: each.text for each in snippets()}
        for name in TASK_FILES:
            (directory / name).write_text(TASK_LINE)
        (directory / "run.yaml").write_text(printed["quickstart.md#a-run-of-your-own"])
        (directory / "my_config.yaml").write_text(
            printed["quickstart.md#a-run-of-your-own"].replace("my_agent.MyAgent", "areal.workflow.RLVRWorkflow")
        )
        (directory / "my_agent.py").write_text(printed["agents.md#write-an-agent"])
        parts = (
            "README.md#train-your-own-agent",
            "algorithms.md#functions-of-your-own-2",
            "rewards.md#how-a-reward-function-is-called",
        )
        sources = [printed[name].partition("\nreward = ")[0] for name in parts]
        (directory / "my_module.py").write_text("\n".join(sources) + MY_MODULE)
        for name in ("key.txt", "admin.key"):
            (directory / name).write_text("sk-a-key-of-the-reader\n")
            (directory / name).chmod(0o600)
        for name in OF_A_CLONE:
            (directory / name).symlink_to(ROOT / name)
        (directory / "h100-7b.yaml").symlink_to(ROOT / "examples/simulation/h100-7b.yaml")
        for name in MODELS:
            self.link(name, model)

    def link(self, name: str, target: Path) -> None:
        """In place of what is there."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    def have_runs(self, text: str) -> None:
        """Those that a command or a file names."""
        for experiment, trial in RUN.findall(text):
            place = self.directory / "runs" / experiment / trial
            if not place.exists():
                shutil.copytree(self._run(experiment), place)
        for run, step in CHECKPOINT.findall(text):
            checkpoints = self.directory / run / "checkpoints"
            if not (checkpoints / step).exists():
                (newest,) = checkpoints.glob("step-*")
                shutil.copytree(newest, checkpoints / step)


def train_a_little(directory: Path) -> Path:
    """A real run of two steps, for every verb that takes a run."""
    words = ["train", "--demo", "trial_name=one", f"output_dir={directory}", "total_train_steps=2", "quiet=true"]
    words += ["rollout.in_process=true", "rollout.num_workers=1", "gconfig.n_samples=2", "gconfig.max_new_tokens=8"]
    words += ["train_dataset.batch_size=4", "valid_dataset.path="]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(words)
    assert code == 0, printed.getvalue()
    return directory / "sort-digits" / "one"


def train_an_adapter(directory: Path) -> Path:
    """A real run whose model is an adapter; supervised, since that needs no process but this one."""
    words = ["experiment_name=lora", "trial_name=one", f"output_dir={directory}", "total_train_steps=1", "quiet=true"]
    words += ["actor.lora.rank=4", "train_dataset.path=builtin:sort-digits", "train_dataset.batch_size=2"]
    config, _ = load_expr_config(words, SFTConfig)
    with SFTTrainer(config) as trainer:
        trainer.train()
    return directory / "lora" / "one"
