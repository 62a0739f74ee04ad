"""Tasks from every source, and errors that say where the fault is."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import DatasetError
from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset, read_tasks

TASKS = [{"messages": [{"role": "user", "content": "Sort 21"}], "answer": "12"}, {"answer": "3", "weight": 0.5}]


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_jsonl_is_read_line_by_line_past_empty_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "\n\r\n".join(map(json.dumps, TASKS)) + "\r\n\n")
    assert read_tasks(path) == read_tasks(str(path)) == TASKS
    assert get_custom_dataset("train", DatasetConfig(path=str(path))) == TASKS


def test_jsonl_may_hold_every_character_that_json_allows(tmp_path: Path) -> None:
    task = {"text": "café\u2028two\u0085three\x7f 数"}
    assert read_tasks(write(tmp_path, json.dumps(task, ensure_ascii=False))) == [task]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n\n{"a": \n', r"tasks\.jsonl line 3 is not JSON"),
        ('{"a": 1}\n[1]\n', r"tasks\.jsonl line 2 must be a JSON object, got list"),
        ("[" * 100_000, r"tasks\.jsonl line 1 is not JSON"),
        ("", "at least one task"),
        (b'{"a": "\xff"}', "must be UTF-8"),
    ],
)
def test_broken_jsonl_names_the_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_tasks(write(tmp_path, text))


def test_a_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(DatasetError, match=r"cannot read tasks from 'xxx.*: File name too long"):
        read_tasks("x" * 5000)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"cannot read tasks from '.*gone\.jsonl': No such file"):
        read_tasks(tmp_path / "gone.jsonl")


def test_a_list_of_dicts_is_copied() -> None:
    tasks = read_tasks(TASKS)
    assert tasks == TASKS
    tasks[0]["answer"] = "changed"
    assert TASKS[0]["answer"] == "12"


@pytest.mark.parametrize("source", [[{"a": 1}, "text"], [{"a": 1}, None]])
def test_a_task_that_is_no_dict_is_named_by_its_number(source: Any) -> None:
    with pytest.raises(DatasetError, match=r"a task must be a dict, got .* as number 1"):
        read_tasks(source)


def test_no_tasks_are_refused() -> None:
    with pytest.raises(DatasetError, match="at least one task"):
        read_tasks([])


def test_a_datasets_dataset_is_read() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"question": "Sort 21", "answer": "12"}, {"question": "Sort 31", "answer": "13"}]
    assert read_tasks(datasets.Dataset.from_list(rows)) == rows


def test_size_takes_the_first_tasks_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join(map(json.dumps, TASKS)))
    assert get_custom_dataset("train", DatasetConfig(path=str(path), size=1)) == TASKS[:1]


def test_a_config_without_path_says_what_to_set() -> None:
    with pytest.raises(DatasetError, match=r"set train_dataset\.path or valid_dataset\.path"):
        get_custom_dataset("train", DatasetConfig())


def test_the_configs_own_split_wins() -> None:
    config = DatasetConfig(path="builtin:sort-digits", split="valid", size=5)
    assert get_custom_dataset("train", config) == get_custom_dataset(
        "valid", DatasetConfig(path="builtin:sort-digits", size=5)
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DatasetConfig(path="builtin:chess"), "no built-in task 'chess'; there are sort-digits, sums"),
        (DatasetConfig(path="builtin:sums", split="dev"), "no split 'dev'; there are"),
        (DatasetConfig(path="builtin:sums", size=10**6), "has .* train tasks, asked for 1000000"),
    ],
)
def test_what_no_builtin_task_has_is_refused_with_what_there_is(config: DatasetConfig, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        get_custom_dataset("train", config)
