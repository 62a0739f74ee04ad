import shutil
import subprocess

import pytest

from areal.cli.completion import SCRIPTS, completed
from areal.cli.verbs import VERBS

ASK = r"""
compopt() { :; }
COMP_LINE="$1" COMP_POINT=${#1}
read -ra COMP_WORDS <<< "$(sed 's/\([=:]\)/ \1 /g' <<< "$1")"
[[ $1 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_areal
printf '%s\n' "${COMPREPLY[@]}"
"""
"""Calls the completion as bash does, which takes = and : for ends of words."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("areal tr", ["train"]),
        ("areal --v", ["--version"]),
        ("areal check --engine ", ["builtin", "fake"]),
        ("areal new a", ["agent"]),
        ("areal train rollout.agent.m", ["rollout.agent.mode="]),
        ("areal train rollout.agent.mode=s", ["subproc"]),
        ("areal train --config x.yaml rollout.when", ["rollout.when_stale="]),
        ("areal train --config ", [""]),  # names of files are bash's own business
        ("areal chat ", [""]),
    ],
)
def test_bash_completes(line: str, offered: list[str]) -> None:
    script = SCRIPTS["bash"](completed()) + ASK
    done = subprocess.run(["bash", "-c", script, "bash", line], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == offered


@pytest.mark.slow
@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_is_one_that_its_shell_can_read(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    script = SCRIPTS[shell](completed())
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_has_every_verb_every_long_option_and_the_settings(shell: str) -> None:
    script = SCRIPTS[shell](completed())
    for verb in completed():
        assert verb.verb in VERBS
        for name in (name for option in verb.options for name in option.names if name.startswith("--")):
            assert (f"-l {name[2:]} " if shell == "fish" else name) in script
    assert "rollout.agent.mode=subproc" in script
