"""What a reader of the documentation has: the files that the pages tell of, from the pages themselves, and runs."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

from page_snippets import ROOT, snippets

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

    def __init__(self, directory: Path, model: Path, run: Path) -> None:
        """`run` is a finished one, which becomes whichever run a page names."""
        self.directory = directory
        self._run = run
        printed = {each.name: each.text for each in snippets()}
        for name in TASK_FILES:
            (directory / name).write_text(TASK_LINE)
        (directory / "run.yaml").write_text(printed["quickstart.md#a-run-of-your-own"])
        (directory / "my_config.yaml").write_text(
            f"{printed['quickstart.md#a-run-of-your-own']}\nworkflow: areal.workflow.RLVRWorkflow\n"
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

    def have_runs(self, words: list[str]) -> None:
        """Those that a command names, or one where it looks for any."""
        text = " ".join(words)
        named = RUN.findall(text) or [("sort-digits", "one")]
        for experiment, trial in named:
            place = self.directory / "runs" / experiment / trial
            if not place.exists():
                shutil.copytree(self._run, place)
        for run, step in CHECKPOINT.findall(text):
            checkpoints = self.directory / run / "checkpoints"
            if not (checkpoints / step).exists():
                (newest,) = checkpoints.glob("step-*")
                shutil.copytree(newest, checkpoints / step)


def train_a_little(directory: Path) -> Path:
    """A real run, of two steps and with an adapter, which every verb that takes a run or a model can use."""
    words = ["train", "--demo", "trial_name=one", f"output_dir={directory}", "total_train_steps=2"]
    words += ["actor.lora.rank=4", "rollout.in_process=true", "gconfig.n_samples=2", "gconfig.max_new_tokens=8"]
    words += ["train_dataset.batch_size=4", "valid_dataset.path=", "quiet=true"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(words)
    assert code == 0, printed.getvalue()
    return directory / "sort-digits" / "one"
