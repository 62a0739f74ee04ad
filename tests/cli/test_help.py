import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.errors import ModelError
from areal.cli import main as command
from areal.cli.main import guard

ROOT = Path(__file__).parents[2]


def ending(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        command.main(words)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["chat", "--help"], ["doctor", "--help"], ["--version"]]
)
def test_help_loads_neither_torch_nor_other_heavy_libraries(words: list[str]) -> None:
    code = "import sys\nfrom areal.cli.main import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n"
    code += "    assert end.code == 0, end.code\n"
    code += "heavy = {'torch', 'transformers', 'numpy', 'openai', 'httpx', 'matplotlib'} & set(sys.modules)\n"
    code += "assert not heavy, heavy\n"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "areal" in done.stdout


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending("--help") == 0
    shown = capsys.readouterr().out
    for name, verb in command.VERBS.items():
        assert f"  {name}" in shown
        assert verb.summary in shown


def test_help_fits_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending("--help") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_only_missing_words_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending("check") == 2
    assert capsys.readouterr().err.endswith("required: WORKFLOW\n")


def test_help_of_a_verb_shows_its_words_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending("train", "--help") == 0
    shown = capsys.readouterr().out
    assert "--config FILE" in shown
    assert "KEY=VALUE" in shown
    assert "example: areal train" in shown


@pytest.mark.parametrize("words", [[], ["fly"], ["chat"], ["train", "--confg", "x"]])
def test_wrong_words_end_with_code_2_and_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(*words) == 2
    assert "usage: areal" in capsys.readouterr().err


def test_every_verb_has_its_own_file_with_a_run() -> None:
    for name in command.VERBS:
        home = ROOT / "areal/cli"
        path = home / f"{name}.py" if (home / f"{name}.py").exists() else home / name / "__init__.py"
        assert "def run(" in path.read_text()


@pytest.mark.parametrize(("answer", "code"), [(None, 0), (0, 0), (3, 3)])
def test_guard_passes_the_programs_own_code(answer: int | None, code: int) -> None:
    assert guard(lambda: answer) == code


def test_guard_turns_an_error_for_the_user_into_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AREAL_LOG", raising=False)

    def fails(where: str) -> None:
        raise ModelError(f"no model in {where}; give a directory with config.json")

    assert guard(fails, "nowhere") == 2
    assert capsys.readouterr().err == "areal: no model in nowhere; give a directory with config.json\n"


def test_guard_shows_the_traceback_when_the_log_is_at_debug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_LOG", "debug")

    def fails() -> None:
        raise ModelError("no")

    assert guard(fails) == 2
    assert "Traceback" in capsys.readouterr().err


def test_guard_ends_with_130_on_ctrl_c() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert guard(interrupted) == 130


def test_guard_leaves_our_own_faults_alone() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guard(broken)
