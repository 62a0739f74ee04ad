"""What a model or an agent said cannot command the terminal in which it is quoted."""

import logging
import sys

import pytest

from areal.api.errors import ArealError
from areal.cli.main import guard
from areal.utils.logging import ROOT, getLogger

HOSTILE = "\x1b]0;title\x07 \x1b[2J \u202eright to left\nnext\tline"
SHOWN = "�]0;title� �[2J �right to left\nnext\tline"


def test_log_lines_and_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger(ROOT)
    monkeypatch.setattr(root, "handlers", [])  # as in a new process
    getLogger()
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        said = {"msg": "an agent said %s", "args": (HOSTILE,), "exc_info": sys.exc_info()}
    (handler,) = root.handlers
    printed = handler.format(logging.makeLogRecord(said))
    assert f"an agent said {SHOWN}\n" in printed
    assert printed.endswith(f"ValueError: {SHOWN}")
    assert "\x1b" not in printed


def test_errors_that_end_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise ArealError(f"all episodes failed: {HOSTILE}")

    assert guard(fails) == 2
    assert capsys.readouterr().err == f"areal: all episodes failed: {SHOWN}\n"
