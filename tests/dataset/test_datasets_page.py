"""docs/datasets.md names every built-in task, and its example runs."""

import json
import re
from pathlib import Path

import pytest

from areal.dataset.builtin import TASKS

PAGE = (Path(__file__).parents[2] / "docs/datasets.md").read_text()


def test_the_table_holds_every_built_in_task() -> None:
    table = PAGE.partition("## Built-in tasks")[2]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(TASKS)


def test_the_printed_example_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, _ = _blocks()
    assert "\nassert " in first
    exec(first, {})


@pytest.mark.slow
def test_the_printed_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, script = _blocks()
    settings = 'experiment_name: sft\ntrial_name: one\ntrain_dataset: {path: "builtin:sort-digits"}\n'
    (tmp_path / "sft.yaml").write_text(settings)
    words = ["--config", "sft.yaml", "total_train_steps=2", "train_dataset.batch_size=2"]
    monkeypatch.setattr("sys.argv", ["sft.py", *words])
    exec(script, {"__name__": "__main__"})
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 2


def _blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
