"""What `areal new` writes runs as it is written."""

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal.api.errors import ConfigError
from areal.cli.main import main
from areal.cli.new import with_export

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=project, env=env, capture_output=True, text=True, timeout=100
    )


def test_generated_files_pass_their_own_tests_and_the_linter(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    assert main(["new", "workflow", "long_division", "--into", "mypkg"]) == 0
    assert main(["new", "agent", "search", "--into", "mypkg"]) == 0
    done = run(project, "pytest", "-q", "tests")
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for words in (["check"], ["format", "--check"]):
        done = run(project, "ruff", *words, *config, "mypkg", "tests")
        assert done.returncode == 0, done.stdout


def test_new_package_exports_the_name_and_one_that_exists_is_left_alone(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["new", "workflow", "long_division", "--into", "mypkg"])
    main(["new", "agent", "search_agent", "--into", "mypkg"])
    assert (project / "mypkg/__init__.py").read_text() == (
        'from mypkg.long_division import LongDivisionWorkflow\n\n__all__ = ["LongDivisionWorkflow"]\n'
    )
    said = capsys.readouterr().out
    assert "from mypkg.search_agent import SearchAgent  # add to mypkg/__init__.py\n" in said
    assert 'trainer.train(workflow="mypkg.long_division.LongDivisionWorkflow", workflow_kwargs=' in said
    assert 'trainer.train(workflow="mypkg.search_agent.SearchAgent")' in said
    assert "areal train --demo workflow=mypkg.search_agent.SearchAgent\n" in said


def test_checkout_of_this_package_gets_it_among_its_workflows(project: Path) -> None:
    text = (ROOT / "areal/workflow/__init__.py").read_text()
    (project / "areal/workflow").mkdir(parents=True)
    (project / "areal/__init__.py").touch()
    (project / "areal/workflow/__init__.py").write_text(text)
    assert main(["new", "workflow", "zebra"]) == 0
    after = (project / "areal/workflow/__init__.py").read_text()
    assert "    from areal.workflow.zebra import ZebraWorkflow\n" in after
    assert '"ZebraWorkflow": "areal.workflow.zebra"' in after
    added = [line for line in after.splitlines() if line not in text.splitlines()]
    assert "ZebraWorkflow" in exported(after)
    assert len(added) <= 3
    assert "from areal.workflow.zebra import ZebraWorkflow" in (project / "tests/test_zebra_workflow.py").read_text()
    linted = run(project, "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache", "areal")
    assert linted.returncode == 0, linted.stdout


def exported(text: str) -> list[str]:
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return list(names)


def test_directory_that_is_no_package_gets_a_module_and_a_test(project: Path) -> None:
    assert main(["new", "agent", "search"]) == 0
    assert sorted(path.relative_to(project).as_posix() for path in project.rglob("*.py")) == [
        "search.py",
        "tests/test_search_agent.py",
    ]
    assert "from search import SearchAgent" in (project / "tests/test_search_agent.py").read_text()
    assert main(["new", "agent", "my_agent"]) == 0
    assert (project / "tests/test_my_agent.py").exists(), "its kind is said once"


def test_package_below_src_gets_its_tests_at_the_top_of_the_project(project: Path) -> None:
    (project / "pyproject.toml").touch()
    (project / "src/mypkg").mkdir(parents=True)
    (project / "src/mypkg/__init__.py").write_text('"""Mine."""\n')
    assert main(["new", "agent", "search", "--into", "src/mypkg"]) == 0
    assert "from mypkg.search import SearchAgent" in (project / "tests/test_search_agent.py").read_text()
    assert (project / "src/mypkg/__init__.py").read_text() == '"""Mine."""\n'


def test_second_time_is_refused_and_changes_nothing_unless_forced(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words: Sequence[str] = ["new", "agent", "search", "--into", "mypkg"]
    assert main(words) == 0
    before = (project / "mypkg/__init__.py").read_text()
    (project / "mypkg/search.py").write_text("mine = 1\n")
    assert main(words) == 2
    assert "mypkg/search.py exists; choose another name or add --force" in capsys.readouterr().err
    assert (project / "mypkg/search.py").read_text() == "mine = 1\n"
    assert main([*words, "--force"]) == 0
    assert "class SearchAgent" in (project / "mypkg/search.py").read_text()
    assert (project / "mypkg/__init__.py").read_text() == before


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("My-Agent", "try my_agent"), ("MyAgent", "try my_agent"), ("class", "keyword"), ("2b", "'2b'")],
)
def test_bad_name_is_refused_with_a_better_one(
    project: Path, name: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "agent", name]) == 2
    error = capsys.readouterr().err
    assert "a name must be a module's" in error
    assert remedy in error
    assert list(project.iterdir()) == []


@pytest.mark.parametrize("words", [["json"], ["numpy"], ["search", "--into", "email"]])
def test_module_that_would_hide_another_is_refused(
    project: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "agent", *words]) == 2
    assert "would hide; rename it" in capsys.readouterr().err
    assert list(project.iterdir()) == []


OURS = (ROOT / "areal/workflow/__init__.py").read_text()


def test_our_own_package_gets_each_name_once_and_in_order() -> None:
    once = with_export(OURS, "areal.workflow.new_one", "NewOneWorkflow")
    assert with_export(once, "areal.workflow.new_one", "NewOneWorkflow") == once
    assert exported(once) == sorted([*exported(OURS), "NewOneWorkflow"])
    many = once
    for letter in "abcdef":
        many = with_export(many, f"areal.workflow.{letter}", f"{letter.upper() * 20}Workflow")
    assert exported(many) == sorted(exported(many))
    assert max(map(len, many.splitlines())) <= 120


@pytest.mark.parametrize("part", ["__all__ = ", "    from areal.workflow.", '": "areal.workflow.'])
def test_our_own_package_in_another_form_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match=r"areal/workflow/__init__.py must .*; restore"):
        with_export(OURS.replace(part, part.replace("a", "b")), "areal.workflow.new_one", "NewOneWorkflow")
