"""Ctrl-C: the first one asks a run to end in order, the second ends it at once."""

import os
import signal
import threading

import pytest

from areal.trainer.run import Interrupted, Interruption


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
