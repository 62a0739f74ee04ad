import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.errors import ModelError
from areal.cli import main as command
from areal.cli.main import _json_alone, guard
from areal.cli.parsers import verb_parser
from areal.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]


def ending(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        command.main(words)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.slow
def test_no_help_and_no_list_of_settings_loads_a_heavy_library() -> None:
    """All in one process, so that one start of Python is paid for."""
    code = "import sys\nfrom areal.cli.main import VERBS, main\n"
    code += "for words in (['--help'], ['--version'], *([verb, '--help'] for verb in VERBS)):\n"
    code += "    try:\n        main(words)\n    except SystemExit as end:\n        assert end.code == 0, words\n"
    code += "assert not {'asyncio', 'yaml', 'rich'} & set(sys.modules), 'help needs none of them'\n"
    code += "main(['config', '--json'])\nmain(['completion', 'bash'])\n"
    code += "heavy = {'torch', 'transformers', 'numpy', 'openai', 'httpx', 'matplotlib', 'rich'} & set(sys.modules)\n"
    code += "assert not heavy, heavy\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: areal") == len(VERBS) + 1


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending("--help") == 0
    shown = capsys.readouterr().out
    for name, verb in VERBS.items():
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
    assert "examples:\n  # " in shown
    assert "\n  areal train --demo\n" in shown


@pytest.mark.parametrize("verb", VERBS)
def test_examples_in_help_are_words_that_the_verb_takes(verb: str) -> None:
    parser = verb_parser(verb, VERBS[verb])
    for line in VERBS[verb].examples:
        words = shlex.split(line.split(" | ")[-1 if line.startswith("echo") else 0].split(" > ")[0])
        if words[0] != "eval":
            assert words[:2] == ["areal", verb]
            parser.parse_words(words[2:])


def test_examples_of_rescore_can_follow_each_other() -> None:
    parser = verb_parser("rescore", VERBS["rescore"])
    given = [parser.parse_words(shlex.split(line)[2:]) for line in VERBS["rescore"].examples]
    names = [each.name or each.reward for each in given]
    assert len(names) == len(set(names)), "a result is a new file"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "areal: no verb trian; did you mean train?"),
        (["--hepl"], "areal: no option --hepl; did you mean --help?"),
        (["xyzzy"], "areal: no verb xyzzy; areal --help lists them"),
        (["train", "--confg", "x"], "areal train: no option --confg; did you mean --config?"),
        (["rescore", "RUN", "--rewrd=f"], "areal rescore: no option --rewrd; did you mean --reward?"),
        (["train", "--conf", "x"], "areal train: no option --conf; did you mean --config?"),
        (["train", "--xyzzy"], "areal train: no option --xyzzy"),
    ],
)
def test_mistyped_word_is_answered_with_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending(*words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_help_of_a_verb_can_be_asked_for_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending("help", "train") == 0
    first = capsys.readouterr().out
    assert ending("train", "--help") == 0
    assert first == capsys.readouterr().out


def test_output_that_nobody_reads_any_more_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", closed)
        assert command.main(["completion", "bash"]) == 141
    assert capfd.readouterr().err == ""


def test_an_error_for_the_user_outlives_a_closed_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        print("a part of the answer")
        raise ModelError("no")

    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", closed)
        guard(fails)
    assert capfd.readouterr().err == "areal: no\n"


@pytest.mark.parametrize("words", [[], ["fly"], ["chat"], ["train", "--confg", "x"]])
def test_wrong_words_end_with_code_2_and_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(*words) == 2
    assert "usage: areal" in capsys.readouterr().err


def test_every_verb_has_its_own_file_with_a_run() -> None:
    for name in VERBS:
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


def test_guard_leaves_another_broken_pipe_alone(capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise BrokenPipeError("of a socket")

    with pytest.raises(BrokenPipeError, match="of a socket"):
        guard(broken)


def test_what_others_print_is_not_among_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    with _json_alone() as out:
        print("noise")
        print("{}", file=out)
    assert capsys.readouterr() == ("{}\n", "noise\n")


@pytest.mark.slow
def test_what_other_processes_print_is_not_among_the_json() -> None:
    code = "import os, sys\nfrom areal.cli.main import _json_alone\n"
    code += "with _json_alone() as out:\n    print('noise', flush=True)\n    os.system('echo noise')\n"
    code += "    print('{}', file=out)\nprint('after')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{}\nafter\n", "noise\nnoise\n")


def test_no_option_has_the_name_that_results_are_printed_by() -> None:
    for name, verb in VERBS.items():
        assert all(action.dest != "stdout" for action in verb_parser(name, verb)._actions)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
@pytest.mark.parametrize("words", ["completion bash", "config timeout"])
def test_output_to_a_full_disk_ends_with_one_line(
    words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert command.main(words.split()) == 2
    assert capfd.readouterr().err == (
        "areal: cannot use the output: No space left on device; free some space, or choose another place\n"
    )


def test_a_file_that_the_disk_refuses_is_named_and_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "pages/index.html")

    assert guard(run) == 2
    assert capsys.readouterr().err == (
        "areal: cannot use pages/index.html: Read-only file system; choose another place\n"
    )
