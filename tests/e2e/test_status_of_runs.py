"""What `areal status` says of a real run while the test holds one of its parts, and after its driver was killed."""

import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from real_runs import END_SECONDS, Run, Start

from areal.cli.main import main
from areal.cli.status import RESUMABLE

HELD = '''
import asyncio
import fcntl
import os

from areal.api.reward_api import AsyncRewardWrapper
from areal.workflow.openai.math_agent import MathAgent


def pass_through(name):
    """Returns at once, unless the test holds the lock of that name."""
    with open(os.path.join(os.environ["LOCKS"], name)) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def scored(reward):
    pass_through("reward")
    return reward


class Held(MathAgent):
    async def run(self, data, **extra_kwargs):
        await asyncio.to_thread(pass_through, "agent")
        reward = await super().run(data, **extra_kwargs)
        pass_through("loop")
        return await AsyncRewardWrapper(scored, timeout_seconds=120)(reward)
'''
LOCKS = ("agent", "loop", "reward")
WAIT_SECONDS = 120.0
WAITING = r"waits for (\d of 4 groups|an evaluation of 16 tasks: \d+ done)"


@pytest.fixture
def run(example: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "held.py").write_text(HELD)
    for name in LOCKS:
        (tmp_path / name).touch()
    monkeypatch.setenv("LOCKS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    patient = ("scheduler.heartbeat_seconds=600", "rollout.agent.timeout_seconds=600")
    run = example("total_train_steps=1000", "workflow=held.Held", *patient)
    run.wait_for(r"starting the engine and the rollout workers: ")
    return run


@contextmanager
def held(path: Path) -> Iterator[IO[str]]:
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until_told(run_dir: Path, capsys: pytest.CaptureFixture[str], *patterns: str) -> str:
    """What `areal status` prints, as soon as every pattern is found in it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        assert main(["status", str(run_dir)]) == 0
        text = re.sub(r"\n {4,}", " ", capsys.readouterr().out)  # a line for each sentence
        if all(re.search(pattern, text) for pattern in patterns):
            return text
        assert time.monotonic() < deadline, text


LIMIT = r"for .*, until .* at most \(rollout\.agent\.timeout_seconds=600\)"


def test_episodes_that_are_held_for_ever_are_told_with_the_right_sentence(
    run: Run, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(tmp_path / "agent"):
        until_told(run_dir, capsys, WAITING, rf"  .*task \d+.* runs its own code, at held.py:\d+ in run, {LIMIT}")
    with held(tmp_path / "reward"):
        reward = r"  .*task \d+.* waits for its reward function held.scored, for .*, until .* at most"
        until_told(run_dir, capsys, WAITING, reward)
    with held(tmp_path / "loop"):
        blocked = r"its event loop is blocked at held.py:\d+ in pass_through: fcntl.flock\(.*\) \(task -?\d+\)"
        until_told(run_dir, capsys, blocked)
    run.wait_for(r"^step [1-9]\d*/1000 ")


def test_processes_that_are_stopped_are_told_as_frozen(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.wait_for(r"^step [1-9]\d*/1000 ")
    with stopped(run.only("areal.engine.inference.server")):
        frozen = r"engine is frozen: it shows no sign of life, .* \(scheduler.heartbeat_seconds=600\)"
        waiting = rf"task \d+.* waits for the model, {LIMIT}|waits until engine .* the weights of version \d+"
        until_told(run_dir, capsys, frozen, waiting)
    with stopped(run.only("areal.rollout.worker")):
        until_told(run_dir, capsys, "rollout worker 0 is frozen: it shows no sign of life", WAITING)


def test_ctrl_backslash_and_sigusr1_print_it_and_the_run_goes_on(run: Run, run_dir: Path) -> None:
    run.wait_for(r"^step [1-9]\d*/1000 ")
    processes = run.descendants()
    for number in (signal.SIGQUIT, signal.SIGUSR1):
        run.lines.clear()
        os.killpg(run.pid, number)  # as a terminal does: to all of the foreground group
        run.wait_for(r"^the trainer, in step \d+, ")
        run.wait_for(r"^engine runs")
    assert processes.keys() <= run.descendants().keys()
    run.kill(signal.SIGINT)
    assert run.wait(END_SECONDS) == 130, run.text


def test_run_whose_driver_was_killed_says_at_which_step_and_how_to_go_on(
    run: Run, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.wait_for(r"^step [1-9]\d*/1000 ")
    run.kill(signal.SIGKILL)
    run.wait(END_SECONDS)
    assert main(["status", str(run_dir)]) == RESUMABLE
    told, remedy = capsys.readouterr().out.splitlines()
    assert re.search(r": its driver was killed after step \d+; the last sign of it is of 20", told)
    assert remedy.endswith("give the same command with trial_name=one")
