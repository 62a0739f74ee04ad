"""`areal new --example`: what is in the repository runs where it is copied to, from a clone and from a wheel alike."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from areal.cli.main import main
from areal.cli.new import examples
from areal.cli.new.examples import COMMANDS, known_examples
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config

ROOT = Path(__file__).parents[2]
NAMES = sorted(known_examples())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def copied(here: Path) -> set[str]:
    return {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()}


def test_every_example_is_known_and_listed_with_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir()) == NAMES
    assert main(["new", "--example"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line[:1].strip()][:-1] == NAMES
    assert re.search(r"^countdown {2,}A small model learns to reach a target", shown, re.MULTILINE)
    for example in known_examples().values():
        assert example.summary.endswith("."), example.name
        assert example.commands, example.name


@pytest.mark.parametrize("name", NAMES)
def test_copy_is_all_that_its_commands_and_settings_name(name: str, here: Path) -> None:
    assert main(["new", "--example", name]) == 0
    files = copied(here)
    texts = {file: (here / file).read_text("utf-8") for file in files}
    commands = "".join(COMMANDS.findall(texts[f"examples/{name}/README.md"]))
    named = {path.rstrip("/.") for path in re.findall(r"(?<![\w/])examples/[\w./-]+", commands)}
    assert named
    for file, text in texts.items():
        if file.endswith(".yaml"):
            named |= set(re.findall(r"(?<![\w/])examples/\w+/(?:\w[\w.-]*)", re.sub(r"#.*", "", text)))
    assert [path for path in sorted(named) if not (here / path).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_copied_readme_does_not_speak_of_a_repository_that_is_not_there(name: str, here: Path) -> None:
    assert main(["new", "--example", name]) == 0
    text = (here / "examples" / name / "README.md").read_text("utf-8")
    assert "root of the repository" not in text
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (here / "examples" / name / link).exists()] == []


def test_copied_settings_load(here: Path) -> None:
    assert main(["new", "--example", "countdown"]) == 0
    config, _ = load_expr_config(["--config", "examples/countdown/config.yaml"], GRPOConfig)
    assert config.actor.path == "builtin:tiny-countdown"


def test_example_comes_with_the_one_whose_files_it_uses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--example", "reward_model"]) == 0
    assert {"examples/reward_model/train.py", "examples/dpo/pairs.py"} <= copied(here)
    assert "run it\n  python3 examples/dpo/pairs.py runs/pairs" in capsys.readouterr().out


def test_what_runs_leave_is_not_copied(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples/dpo", here / "elsewhere/dpo")
    for made in ("runs/one/run.db", "__pycache__/train.cpython-311.pyc"):
        (here / "elsewhere/dpo" / made).parent.mkdir(parents=True)
        (here / "elsewhere/dpo" / made).touch()
    monkeypatch.setattr(examples, "REPOSITORY", here / "elsewhere")
    assert main(["new", "--example", "dpo", "--into", "mine"]) == 0
    tracked = {path.name for path in (ROOT / "examples/dpo").iterdir() if path.is_file()}
    assert copied(here / "mine") == {f"examples/dpo/{name}" for name in tracked}


def test_files_that_a_wheel_carries_come_first(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "carried/only").mkdir(parents=True)
    (here / "carried/only/README.md").write_text("# Only\n\nThe one example. More.\n\n```bash\nareal doctor\n```\n")
    monkeypatch.setattr(examples, "CARRIED", here / "carried")
    assert main(["new", "--example"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split(maxsplit=1) == ["only", "The one example."]


def test_second_copy_changes_nothing_and_overwrites_only_with_force(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["new", "--example", "countdown", "--into", "sub"]
    assert main(words) == 0
    assert "  cd sub\n  areal train --config examples/countdown/config.yaml" in capsys.readouterr().out
    assert main(words) == 0
    assert "unchanged  sub/examples/countdown/config.yaml" in capsys.readouterr().out
    mine = here / "sub/examples/countdown/config.yaml"
    mine.write_text("seed: 2\n")
    (here / "sub/examples/countdown/README.md").unlink()
    assert main(words) == 2
    assert "sub/examples/countdown/config.yaml exists and differs; add --force" in capsys.readouterr().err
    assert mine.read_text() == "seed: 2\n"
    assert not (here / "sub/examples/countdown/README.md").exists(), "nothing is written before everything is decided"
    assert main([*words, "--force"]) == 0
    assert mine.read_bytes() == (ROOT / "examples/countdown/config.yaml").read_bytes()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_something_else_in_its_place_is_refused_before_a_file_is_written(
    kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = here / "examples/search_agent"
    if kind == "file":
        place.parent.mkdir()
        place.write_text("mine")
    elif kind == "directory":
        (place / "corpus.py").mkdir(parents=True)
    else:
        place.mkdir(parents=True)
        (place / "corpus.py").symlink_to(here / "nothing")
    before = copied(here)
    assert main(["new", "--example", "search_agent"]) == 2
    assert re.fullmatch(r"areal: areal new writes .* is something else; move it.*\n", capsys.readouterr().err)
    assert copied(here) == before


@pytest.mark.parametrize("words", [["--example", "search_agent"], ["agent", "mine"]])
@pytest.mark.parametrize("into", ["/proc/nowhere", "x" * 300])
def test_place_that_cannot_be_written_is_one_line(
    words: list[str], into: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", *words, "--into", into]) == 2
    assert re.fullmatch(r"areal: .*; name another.*\n", capsys.readouterr().err)


def test_command_for_an_odd_place_can_be_pasted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--example", "search_agent", "--into", "a b;c"]) == 0
    assert "\n  cd 'a b;c'\n" in capsys.readouterr().out


def test_clone_has_it_already(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    before = (ROOT / "examples/countdown/README.md").read_bytes()
    assert main(["new", "--example", "countdown"]) == 0
    assert capsys.readouterr().out.startswith("it is here already\n\nrun it\n  areal train --config")
    assert (ROOT / "examples/countdown/README.md").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--example", "countdwn"], "got 'countdwn'; did you mean countdown?"),
        (["--example", "xyzzy"], "got 'xyzzy'; there are agent_workflow, "),
        (["--example", ".."], "got '..'; there are "),
        (["agent", "mine", "--example", "dpo"], "got 'agent' too"),
        (["agent"], "areal new takes a kind and a name, or --example"),
        ([], "areal new takes a kind and a name, or --example"),
        (["--example", "dpo", "--into", "a_file"], "got the file 'a_file'"),
    ],
)
def test_other_words_are_refused_and_nothing_is_written(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "a_file").touch()
    assert main(["new", *words]) == 2
    assert said in capsys.readouterr().err
    assert copied(here) == {"a_file"}


@pytest.mark.slow
def test_everything_that_is_tracked_is_copied(here: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the source distribution has no history to ask")
    done = subprocess.run(
        ["git", "ls-files", "examples/text_environment"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert main(["new", "--example", "text_environment"]) == 0
    assert copied(here) == set(done.stdout.split())
