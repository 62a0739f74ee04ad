"""Ids of the hub, from its cache without a network, and directories that only `datasets` can read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.errors import DatasetError
from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.hub import is_hub_id

datasets = pytest.importorskip("datasets")

CARD = """---
configs:
- {config_name: main, data_files: [{split: train, path: main/train*}, {split: test, path: main/test*}]}
- {config_name: socratic, data_files: [{split: train, path: socratic/train*}]}
---
"""

LOAD = """
import json, sys
from areal.api.errors import DatasetError
from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset
for path, split in json.loads(sys.argv[1]):
    try:
        tasks = get_custom_dataset("train", DatasetConfig(path=path, split=split))
        print(json.dumps([task["messages"][0]["content"] for task in tasks]))
    except DatasetError as error:
        print(error)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a repository with two subsets, as the hub lays them out; the cache is the test's own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    root = tmp_path / "gsm8k"
    for subset, split in (("main", "train"), ("main", "test"), ("socratic", "train")):
        (root / subset).mkdir(parents=True, exist_ok=True)
        rows = [{"question": f"{subset} {split} {number}", "answer": f"#### {number}"} for number in range(4)]
        (root / subset / f"{split}-00000.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "README.md").write_text(CARD)
    return root


def questions(path: str, split: str = "", default: str = "train") -> list[str]:
    tasks = get_custom_dataset(default, DatasetConfig(path=path, split=split))
    return [task["messages"][0]["content"] for task in tasks]


def test_a_subset_of_a_directory_is_read_by_split_and_slice(repository: Path) -> None:
    assert questions(f"{repository}:main", default="test") == [f"main test {number}" for number in range(4)]
    assert questions(f"{repository}:socratic", "train[:50%]") == ["socratic train 0", "socratic train 1"]
    with pytest.raises(DatasetError, match=r"no split 'dev' in .*; there are test, train"):
        questions(f"{repository}:main", "dev")
    with pytest.raises(DatasetError, match=r"cannot load it: .*main.*socratic.*; a subset is named as in .*:SUBSET$"):
        questions(str(repository))


def test_a_directory_of_other_files_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/train.csv").write_text("question,answer\nSort 21,12\n")
    assert questions(str(tmp_path / "tables")) == ["Sort 21"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.csv": 'a,b\n1,2\n"open'}, "cannot load it: .*EOF inside string"),
        ({"train.json": '{"a": '}, "cannot load it: .*JSON parse error"),
        ({"train.tar": "no archive"}, "cannot load it: "),
        ({"tasks.py": "raise"}, "cannot load it: Dataset scripts are no longer supported"),
        ({"README.md": "---\n: : [\n---\n", "train.csv": "a\n1\n"}, "cannot load it: while parsing"),
        ({"state.json": "{}", "dataset_info.json": "{}"}, "looks like a saved Dataset, but .*; save it again"),
        ({"dataset_dict.json": '{"splits": ["train"]}'}, "looks like a saved Dataset, but .*; save it again"),
    ],
)
def test_what_datasets_cannot_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], message: str
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "tasks").mkdir()
    for name, text in files.items():
        (tmp_path / "tasks" / name).write_text(text)
    with pytest.raises(DatasetError, match=message) as caught:
        get_custom_dataset("train", DatasetConfig(path=str(tmp_path / "tasks")))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_without_a_network_an_id_comes_from_the_cache_or_is_one_clear_line(repository: Path, tmp_path: Path) -> None:
    for subset in ("main", "socratic"):
        datasets.load_dataset(str(repository), subset)
    (cached,) = (tmp_path / "cache").glob("gsm8k*")
    cached.rename(tmp_path / "cache/openai___gsm8k")  # as if it had come from there
    wanted = [("openai/gsm8k:main", "test"), ("openai/gsm8k:main", "train[3:]"), ("openai/gsm8k", ""), ("a/b", "")]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, json.dumps(wanted)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    whole, part, ambiguous, absent = done.stdout.splitlines()
    assert json.loads(whole) == [f"main test {number}" for number in range(4)]
    assert json.loads(part) == ["main train 3"]
    assert "main" in ambiguous
    assert "socratic" in ambiguous
    assert absent.startswith("there is no file 'a/b', and the hub that may have it as an id cannot be reached")


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("openai/gsm8k", True),
        ("openai/gsm8k:main", True),
        ("data/train.jsonl", False),
        ("./openai", False),
        ("/data/gsm8k", False),
        ("tasks", False),
        ("a/b/c", False),
    ],
)
def test_what_may_be_an_id(path: str, is_id: bool) -> None:
    assert is_hub_id(path) is is_id
