"""Ctrl-C or SIGTERM: the first one asks a run to end in order, the second ends it at once. Every end saves."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal.api.errors import EngineError, RanksLost
from areal.config.experiment import ExperimentConfig
from areal.trainer.display import Progress
from areal.trainer.run import Interrupted, Interruption, TrainingRun


def test_first_ctrl_c_notifies_and_is_raised_by_the_next_check() -> None:
    notified: list[bool] = []
    with Interruption(lambda: notified.append(True)) as interruption:
        interruption.check()
        os.kill(os.getpid(), signal.SIGINT)
        assert notified == [True]
        with pytest.raises(Interrupted):
            interruption.check()


def test_second_ctrl_c_ends_at_once() -> None:
    with Interruption():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_ctrl_c_did_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_it_leaves_signals_alone() -> None:
    before, failures = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        try:
            with Interruption() as interruption:
                interruption.check()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert failures == []
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("error", [RuntimeError("any"), EngineError("ours"), TimeoutError("late")])
def test_whatever_ends_a_run_after_its_first_step_it_saves(error: Exception) -> None:
    run = OneStep(error)
    with pytest.raises(type(error)):
        run.execute()
    assert run.saved == [1]
    assert run.events == [("failed", f"{type(error).__name__}: {error}")]


def test_an_error_in_the_summary_saves_too() -> None:
    run = OneStep(None)
    with pytest.raises(EngineError):
        run.execute()
    assert run.saved == [1]


def test_sigterm_saves_and_ends_with_its_exit_code() -> None:
    run = OneStep(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run.execute()
    assert ended.value.code == 143
    assert run.saved == [1]
    assert run.events == []


@pytest.mark.parametrize("lost", [RanksLost("rank 1 was killed"), Interrupted()])
def test_ranks_that_end_with_the_run_do_not_start_it_again(lost: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    run = OneStep(signal.SIGTERM, saving_fails_with=lost)
    with pytest.raises(SystemExit) as ended:
        run.execute()
    assert ended.value.code == 143
    assert "step 1 could not be saved" in capsys.readouterr().err


def test_run_that_lost_its_ranks_lets_the_checkpoint_end_before_it_goes_on() -> None:
    """Otherwise its files would be in the way of the same checkpoint, written once more."""
    run, ended = OneStep(RanksLost("rank 1 was killed")), []

    def write() -> None:
        time.sleep(0.2)
        ended.append(True)

    with ThreadPoolExecutor(1) as thread:
        run._saving = thread.submit(write)
        with pytest.raises(RanksLost):
            run.execute()
        assert ended == [True]


class OneStep(TrainingRun):
    """Takes a step, and then meets with what it was given: an error, a signal, or the end, where its summary fails."""

    def __init__(self, then: Exception | signal.Signals | None, *, saving_fails_with: Exception | None = None) -> None:
        directory = SimpleNamespace(path=Path("run"))
        parts: Any = SimpleNamespace(
            directory=directory,
            engine=None,
            tokenizer=None,
            total_steps=3,
            store=self,
            standing=SimpleNamespace(saved_step=0),
            kept=True,
            fingerprint={},
            critic=None,
            status=None,
        )
        super().__init__(ExperimentConfig(), parts, Progress(3))
        self.saved: list[int] = []
        self.events: list[tuple[str, str]] = []
        self._then = then
        self._saving_fails_with = saving_fails_with

    def event(self, kind: str, detail: dict[str, Any]) -> None:
        """As a store takes it."""
        self.events.append((kind, detail["error"]))

    def _train(self) -> None:
        self._step += 1
        if isinstance(self._then, Exception):
            raise self._then
        if self._then is not None:
            os.kill(os.getpid(), self._then)
        self._interruption.check()

    def _save(self) -> Path:
        if self._saving_fails_with is not None:
            raise self._saving_fails_with
        self.saved.append(self._step)
        return Path("run/checkpoint")

    def _summary(self) -> dict[str, Any]:
        raise EngineError("the engine is gone")
