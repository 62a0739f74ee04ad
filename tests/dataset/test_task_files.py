"""Tasks in files: one rule for messages, splits by name, and errors that list the choices."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.errors import DatasetError
from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset, read_tasks
from areal.dataset.sources import with_messages

GSM8K = {"question": "What is 5 + 7?", "answer": "5 + 7 = <<5+7=12>>12\n#### 12"}
POSED = {**GSM8K, "messages": [{"role": "user", "content": "What is 5 + 7?"}]}


def rows(split: str, count: int = 3) -> list[dict[str, Any]]:
    return [{"question": f"{split} {number}", "answer": str(number)} for number in range(count)]


def write_jsonl(path: Path, tasks: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def write_parquet(path: Path, tasks: list[dict[str, Any]]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(tasks), path, row_group_size=2)
    return path


def load(path: Path, default_split: str = "train", **settings: Any) -> list[dict[str, Any]]:
    return get_custom_dataset(default_split, dataset_config=DatasetConfig(path=str(path), **settings))


def questions(tasks: list[dict[str, Any]]) -> list[str]:
    return [task["question"] for task in tasks]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_gsm8k_row_becomes_messages_and_keeps_its_answer(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / f"gsm8k.{write.__name__.removeprefix('write_')}", [GSM8K])
    assert load(path) == read_tasks(path) == [POSED]


@pytest.mark.parametrize("key", ["question", "prompt", "problem"])
def test_text_becomes_a_users_message_and_a_list_is_taken_for_messages(key: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert with_messages({key: "Hello"}) == {key: "Hello", "messages": messages[1:]}
    assert with_messages({key: messages})["messages"] == messages


KEYS = st.sampled_from(["messages", "question", "prompt", "problem", "answer", "other"])


@given(task=st.dictionaries(KEYS, st.text() | st.integers() | st.none()))
def test_adding_messages_keeps_every_key_and_tasks_that_have_them_stay(task: dict[str, Any]) -> None:
    once = with_messages(task)
    assert task.items() <= once.items()
    assert set(once) - set(task) <= {"messages"}
    assert with_messages(once) == once


def test_parquet_keeps_nested_values_and_is_read_as_far_as_asked(tmp_path: Path) -> None:
    tasks = [{"question": f"{n}", "tests": [{"input": "3 4", "output": "7"}], "image": b"\x89"} for n in range(5)]
    path = write_parquet(tmp_path / "tasks.parquet", tasks)
    assert [{key: task[key] for key in tasks[0]} for task in load(path, size=3)] == tasks[:3]


def test_files_of_a_directory_belong_to_the_split_that_their_name_begins_with(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-00000-of-00002.jsonl", rows("a"))
    write_parquet(tmp_path / "train-00001-of-00002.parquet", rows("b"))
    write_jsonl(tmp_path / "test.jsonl", rows("c"))
    write_jsonl(tmp_path / "training_notes.jsonl", rows("d"))
    (tmp_path / "README.md").write_text("# Tasks")
    assert questions(load(tmp_path)) == ["a 0", "a 1", "a 2", "b 0", "b 1", "b 2"]
    assert questions(load(tmp_path, size=4)) == ["a 0", "a 1", "a 2", "b 0"]
    assert questions(load(tmp_path, "test")) == questions(read_tasks(tmp_path, "test")) == ["c 0", "c 1", "c 2"]
    assert not set(questions(load(tmp_path))) & set(questions(load(tmp_path, split="test")))


@pytest.mark.parametrize("name", ["valid.jsonl", "validation-00000-of-00001.jsonl", "val_0.jsonl", "dev.jsonl"])
def test_the_validation_split_goes_by_each_of_its_names(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "data" / name, rows("v"))
    for split in ("valid", "validation", "val", "dev"):
        assert questions(load(tmp_path, split=split)) == questions(rows("v"))


def test_what_datasets_saved_is_read_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    both = {split: datasets.Dataset.from_list(rows(split)) for split in ("train", "validation")}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    both["train"].save_to_disk(tmp_path / "one")
    assert questions(load(tmp_path / "both")) == questions(load(tmp_path / "one", "test")) == questions(rows("train"))
    assert questions(load(tmp_path / "both", split="valid", size=2)) == questions(rows("validation", 2))
    assert load(tmp_path / "one")[0]["messages"] == [{"role": "user", "content": "train 0"}]
    with pytest.raises(DatasetError, match=r"no split 'test' in .*; there are train, validation: set"):
        load(tmp_path / "both", "test")
    with pytest.raises(DatasetError, match=r"'test' is asked for, but .* without splits; leave the split out"):
        load(tmp_path / "one", split="test")


def test_one_file_has_no_splits_to_ask_for(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "tasks.jsonl", rows("a"))
    with pytest.raises(DatasetError, match=r"split 'test' is asked for, but a single file has no splits: .*; leave"):
        load(path, split="test")


def test_a_split_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", rows("a"))
    with pytest.raises(DatasetError, match=r"no split 'test' in .*; there are train: set train_dataset\.split"):
        load(tmp_path, "test")


def test_a_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.md").write_text("question, answer\n")
    with pytest.raises(DatasetError, match=r"holds no \.jsonl or \.parquet file"):
        load(tmp_path)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "tasks.parquet"
    path.write_text("{}")
    with pytest.raises(DatasetError, match=r"tasks\.parquet is not a Parquet file"):
        load(path)
    with pytest.raises(DatasetError, match=r"cannot read tasks from '.*gone\.parquet'"):
        load(tmp_path / "gone.parquet")


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "tasks.parquet", rows("a"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DatasetError, match=r"needs pyarrow\.parquet .*; pip install .*\[datasets\]'$"):
        load(path)
