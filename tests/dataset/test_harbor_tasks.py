"""Harbor's task directories as tasks: what is read, which split it belongs to, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import DatasetError
from areal.config.experiment import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.harbor import PROGRAMS_PATH, CopiedFiles, HarborTask, RunCommand


def write(directory: Path, **files: str) -> Path:
    """A task; keywords are files, with __ for a slash and no suffix for the usual ones."""
    names = {"instruction": "instruction.md", "task": "task.toml", "test": "tests/test.sh"}
    contents = {"instruction": "Sort 31\n", "task": "", "test": "echo 1 > /logs/verifier/reward.txt"} | files
    for key, text in contents.items():
        path = directory / names.get(key, key.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


def read(path: str, split: str = "train", **settings: Any) -> list[dict[str, Any]]:
    return get_custom_dataset(split, DatasetConfig(path=path, **settings))


def test_directories_below_are_tasks_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/c"):
        write(tmp_path / name, instruction=f"Do {name}\n")
    tasks = read(f"harbor:{tmp_path}")
    assert [task["messages"] for task in tasks] == [
        [{"role": "user", "content": f"Do {n}"}] for n in ("a", "b", "deep/c")
    ]
    assert tasks[0]["harbor"] == {"name": "a", "directory": str(tmp_path / "a")}
    assert len(read(f"harbor:{tmp_path}", size=2)) == 2
    assert [task["harbor"]["name"] for task in read(f"harbor:{tmp_path / 'a'}")] == ["a"]


def test_directories_named_like_splits_are_splits(tmp_path: Path) -> None:
    write(tmp_path / "train" / "one")
    write(tmp_path / "dev" / "two")
    assert [task["harbor"]["name"] for task in read(f"harbor:{tmp_path}")] == ["one"]
    assert [task["harbor"]["name"] for task in read(f"harbor:{tmp_path}", "valid")] == ["two"]
    with pytest.raises(DatasetError, match=r"no split 'test' in .*; there are train, dev"):
        read(f"harbor:{tmp_path}", "test")


def test_a_dockerfile_is_followed(tmp_path: Path) -> None:
    docker = """
        # a comment
        FROM ubuntu:24.04
        ENV COLOUR=red SIZE="two words"
        WORKDIR /app
        COPY data.txt notes.txt ./
        RUN mkdir -p sub && \\
            echo hi > sub/x
        WORKDIR sub
        CMD ["bash"]
    """
    files = {"environment__Dockerfile": docker, "environment__data.txt": "1", "environment__notes.txt": "2"}
    limits = "[agent]\ntimeout_sec = 5\n[verifier]\ntimeout_sec = 7.5\n"
    toml = f"{limits}env = {{MODE = 'strict'}}\n[environment]\nenv = {{SIZE = 'one'}}"
    task = HarborTask.read(write(tmp_path / "t", task=toml, **files))
    context = (tmp_path / "t" / "environment").resolve()
    variables = {"COLOUR": "red", "SIZE": "two words"}
    copies = [CopiedFiles(context / name, f"/app/{name}") for name in ("data.txt", "notes.txt")]
    assert task.steps[:2] == copies
    assert task.steps[2:] == [RunCommand("mkdir -p sub &&              echo hi > sub/x", "/app", variables)]
    assert task.workdir == "/app/sub"
    assert task.variables == {"COLOUR": "red", "SIZE": "one"}
    assert (task.agent_seconds, task.verifier_seconds, task.verifier_variables) == (5.0, 7.5, {"MODE": "strict"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"task": "version ="}, "is not TOML"),
        ({"task": "[agent]\ntimeout_sec = -1"}, "timeout_sec .* must be a number > 0 .*, got -1"),
        ({"task": "agent = 3"}, r"\[agent\] of .* must be a table, got 3"),
        ({"task": "[environment]\ndocker_image = 'x'"}, "needs the image 'x'"),
        ({"task": "[[steps]]\nname = 'one'"}, "needs several steps"),
        ({"environment__docker-compose.yaml": ""}, "needs several services"),
        ({"environment__Dockerfile": "FROM a\nFROM b"}, "a sandbox has no stages"),
        ({"environment__Dockerfile": "FROM a\nVOLUME /data"}, "a sandbox cannot follow it"),
        ({"environment__Dockerfile": "FROM a\nCOPY ../secret /app/"}, "there is no '../secret' beside it"),
        ({"environment__Dockerfile": "FROM a\nCOPY --from=b x /app/"}, "only files beside it can be copied"),
        ({"environment__Dockerfile": "FROM a\nCOPY"}, "`COPY `, and only files beside it can be copied"),
        ({"environment__Dockerfile": "FROM a\nCOPY $NOTHING /app/"}, "there is no '' beside it"),
        ({"environment__Dockerfile": 'FROM a\nCOPY "x /app/'}, "cannot be read: No closing quotation"),
        ({"environment__Dockerfile": "FROM a\nCOPY **x /app/"}, "cannot be read: Invalid pattern"),
        ({"environment__Dockerfile": "FROM a\nENV A='x"}, "cannot be read: No closing quotation"),
        ({"environment__Dockerfile": "FROM a\nENV =x"}, "a variable must have a name"),
        ({"task": "[agent]\ntimeout_sec = nan"}, "timeout_sec .* must be a number > 0 .*, got nan"),
        ({"task": "[verifier]\ntimeout_sec = inf"}, "timeout_sec .* must be a number > 0 .*, got inf"),
        ({"task": f"deep = {'[' * 5000}"}, "is not TOML"),
        ({"task": "[environment]\nworkdir = 3"}, "workdir in .* must be a path, got 3"),
        ({"task": "[environment.env]\n'A=B' = 'x'"}, "env in .* must have names without =.*, got 'A=B' = 'x'"),
    ],
)
def test_what_a_sandbox_cannot_do_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    (tmp_path / "secret").write_text("s")
    write(tmp_path / "t", **files)
    with pytest.raises(DatasetError, match=message):
        read(f"harbor:{tmp_path / 't'}")


def test_what_is_no_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="holds no Harbor task"):
        read(f"harbor:{tmp_path / 'empty'}")
    with pytest.raises(DatasetError, match="there is no directory"):
        read(f"harbor:{tmp_path / 'nowhere'}")
    with pytest.raises(DatasetError, match="has no setting 'colour'; there is answer_file"):
        read(f"harbor:{tmp_path}?colour=red")
    (write(tmp_path / "untested") / "tests" / "test.sh").unlink()
    with pytest.raises(DatasetError, match=r"must have tests/test\.sh"):
        read(f"harbor:{tmp_path / 'untested'}")


def test_links_that_lead_back_give_each_task_once(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    for name in ("again", "once-more"):
        (tmp_path / name).symlink_to(tmp_path)
    assert [task["harbor"]["name"] for task in read(f"harbor:{tmp_path}")] == ["a", "b"]


def test_an_instruction_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    instruction = write(tmp_path / "t") / "instruction.md"
    instruction.unlink()
    os.mkfifo(instruction)
    with pytest.raises(DatasetError, match=r"instruction\.md of a Harbor task must be a file"):
        read(f"harbor:{tmp_path}")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-has-this-name/tasks"])
def test_a_path_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(DatasetError, match="there is no directory"):
        read(f"harbor:{name}")


def test_a_directory_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    with pytest.raises(DatasetError, match="must have a UTF-8 name"):
        read(f"harbor:{tmp_path}")


def test_variables_of_a_dockerfile_have_their_values(tmp_path: Path) -> None:
    docker = """
        FROM x
        ARG PART=data
        ENV PLACE=/app/${PART} PATH="/app/bin:$PATH" QUOTED='$PART' ESCAPED=\\$PART "DEFAULT=${NONE:-two words}"
        WORKDIR $PLACE
        COPY $PART.txt .
        RUN [ -d sub ] || mkdir sub
    """
    files = {"environment__Dockerfile": docker, "environment__data.txt": "1"}
    task = HarborTask.read(write(tmp_path / "t", **files))
    assert task.variables == {
        "PART": "data",
        "PLACE": "/app/data",
        "PATH": f"/app/bin:{PROGRAMS_PATH}",
        "QUOTED": "$PART",
        "ESCAPED": "$PART",
        "DEFAULT": "two words",
    }
    assert task.workdir == "/app/data"
    copied, ran = task.steps
    assert isinstance(copied, CopiedFiles)
    assert copied.place == "/app/data/data.txt"
    assert isinstance(ran, RunCommand)
    assert ran.command == "[ -d sub ] || mkdir sub"
