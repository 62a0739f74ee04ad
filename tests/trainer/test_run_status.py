"""`areal status` of a run whose parts are held for ever, of one that ended, and the signals that print the same."""

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import make_directory

from areal.api.engine_api import WeightUpdate
from areal.api.messages import Doing
from areal.cli.main import main
from areal.cli.status import FINISHED, RESUMABLE, SILENT
from areal.engine.inference.remote import RemoteEngine
from areal.infra.loop_thread import LoopThread
from areal.infra.rpc.connect import connect, serve
from areal.infra.rpc.wire import api_wire
from areal.store.records import StepRecord
from areal.store.schema import FAILED
from areal.store.writer import StoreWriter
from areal.trainer.run import TrainingRun
from areal.trainer.run_directory import RunDirectory
from areal.trainer.status import DRIVER_FILE, RunStatus, start_of
from areal.utils import waits

DEADLINE_SECONDS = 60


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with make_directory(tmp_path) as made:
        yield made


@pytest.fixture
def status(directory: RunDirectory) -> Iterator[RunStatus]:
    with RunStatus(directory.path, 200) as made:
        made.follow(lambda: 11, print)
        yield made


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("the run's event loop")
    yield made
    made.close()


Ask = Callable[[], dict[str, Any]]


@pytest.fixture
def ask(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> Ask:
    """What `areal status --json` prints of a run that runs."""

    def ask() -> dict[str, Any]:
        assert main(["status", str(directory.path), "--json"]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    return ask


def test_trainer_that_computes_is_told_with_its_step_and_line(status: RunStatus, ask: Ask) -> None:
    def compute() -> dict[str, Any]:
        with ThreadPoolExecutor(1) as other:
            return other.submit(ask).result(DEADLINE_SECONDS)

    report = compute()
    assert (report["state"], report["step"], report["total_steps"]) == ("running", 11, 200)
    (trainer,) = report["parts"]
    assert trainer["part"] == "the trainer, in step 12,"
    assert trainer["what"].startswith("computes, at ")
    assert trainer["what"].endswith("in compute")
    assert trainer["seconds"] >= 0


def test_text_fits_80_columns(
    status: RunStatus, directory: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with status.trainer.entered(lambda: "waits for 3 of 16 groups", 300.0, "rollout.agent.timeout_seconds"):
        assert main(["status", str(directory.path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith(f": step 11 of 200; driver pid {os.getpid()} on {os.uname().nodename}, for 0 s")
    assert lines[0].startswith("the trainer, in step 12, waits for 3 of 16 groups, for 0 s, until ")
    assert lines[-1].endswith("(rollout.agent.timeout_seconds=300)")
    assert max(map(len, lines)) <= 80


def test_engine_that_does_not_fetch_its_weights_is_what_the_trainer_waits_for(
    status: RunStatus, loop: LoopThread, ask: Ask
) -> None:
    asked = threading.Event()

    async def never(update: WeightUpdate) -> None:
        asked.set()
        await asyncio.Event().wait()

    async def publish() -> None:
        listener = await serve(
            "tcp:127.0.0.1:0",
            lambda channel: channel.handlers.update(stage_weights=never),
            wire=api_wire(),
            secret=b"s",
        )
        channel = await connect(listener.address, wire=api_wire(), peer="engine 1", secret=b"s")
        with waits.current().entered("publishes version 12"):
            await RemoteEngine(channel).stage_weights(WeightUpdate(12, "d", ""))

    with waits.of(status.trainer):
        publishing = loop.begin(publish())
    assert asked.wait(DEADLINE_SECONDS)
    (trainer,) = ask()["parts"]
    assert trainer["what"] == "waits until engine 1 has fetched and checked the weights of version 12"
    assert 0 < trainer["left_seconds"] <= 600
    publishing.cancel()


def test_checkpoint_that_is_not_written_is_told_and_so_is_who_waits_for_it(status: RunStatus, ask: Ask) -> None:
    released, waiting = threading.Event(), threading.Event()
    run: Any = SimpleNamespace(_status=status, _keep_checkpoint=lambda step: None)
    with ThreadPoolExecutor(2) as threads:

        def write() -> None:
            assert released.wait(DEADLINE_SECONDS)

        run._saving = threads.submit(TrainingRun._finish_checkpoint, run, 10, write)

        def train() -> None:
            with waits.of(status.trainer):
                waiting.set()
                TrainingRun._wait_until_saved(run)

        trained: Future[None] = threads.submit(train)
        try:
            assert waiting.wait(DEADLINE_SECONDS)
            while len(parts := ask()["parts"]) < 2 or "waits" not in parts[0]["what"]:
                pass  # its thread has not come to it yet
        finally:
            released.set()
        trained.result(DEADLINE_SECONDS)
    trainer, checkpoint = parts
    assert trainer["what"] == "waits until the checkpoint before is written"
    assert (checkpoint["part"], checkpoint["what"]) == ("the checkpoint", "of step 10 is being written")
    assert 0 < checkpoint["left_seconds"] <= 3600
    assert status.trainer.now() == status.saving.now() == []


class FakeCluster:
    """Stands in for `Cluster`."""

    def __init__(self, loop: LoopThread, answers: dict[str, list[Doing] | None]) -> None:
        self.loop, self.thread_id = loop.loop, loop.thread_id
        self.processes = self.status = self
        self.answers = answers

    def doings(self) -> dict[str, Doing]:
        return {name: Doing(name, "runs") for name in self.answers}

    async def ask(self) -> dict[str, list[Doing] | None]:
        return self.answers


def test_process_that_gives_no_answer_is_itself_the_finding(status: RunStatus, loop: LoopThread, ask: Ask) -> None:
    cluster: Any = FakeCluster(loop, {"engine 0": [Doing("it", "loads the model")], "rollout worker 0": None})
    status.watch(cluster)
    _, engine, worker = ask()["parts"]
    assert [each["what"] for each in engine["inside"]] == ["loads the model"]
    assert worker["what"] == "gave no answer for 2 s: it is frozen, or computes and lets no other thread run"


def test_blocked_event_loop_of_the_driver_is_named_with_its_line(status: RunStatus, loop: LoopThread, ask: Ask) -> None:
    blocks, released = threading.Event(), threading.Event()

    def block() -> None:
        blocks.set()
        released.wait(DEADLINE_SECONDS)

    status.watch(FakeCluster(loop, {}))  # type: ignore[arg-type]
    loop.call(block)
    try:
        assert blocks.wait(DEADLINE_SECONDS)
        _, held = ask()["parts"]
    finally:
        released.set()
    assert held["part"] == "the driver's event loop"
    assert "in block: released.wait(DEADLINE_SECONDS)" in held["what"]


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGUSR1])
def test_signal_prints_the_same_and_harms_nothing(directory: RunDirectory, number: signal.Signals) -> None:
    said: list[str] = []
    printed = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        printed.set()

    before = signal.getsignal(number)
    with RunStatus(directory.path, 200) as status:
        status.follow(lambda: 11, say)
        os.kill(os.getpid(), number)
        assert printed.wait(DEADLINE_SECONDS)
    assert said[0].splitlines()[1].startswith("the trainer, in step 12, computes, at ")
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_only_its_user_may_ask_and_only_while_it_runs(directory: RunDirectory) -> None:
    with RunStatus(directory.path, 200):
        assert (directory.path / DRIVER_FILE).stat().st_mode & 0o777 == 0o600
    assert not (directory.path / DRIVER_FILE).exists()


def step(directory: RunDirectory, number: int) -> None:
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number, "reward": 0.5}) + "\n")


def test_run_that_was_stopped_says_at_which_step_and_how_to_go_on(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    step(directory, 39)
    step(directory, 40)
    (directory.path / "checkpoints/step-000030").mkdir()
    assert main(["status", str(directory.path)]) == RESUMABLE
    stopped, remedy = capsys.readouterr().out.splitlines()
    assert f"{directory.path}: stopped after step 40; the last sign of it is of 20" in stopped
    assert remedy == "to go on, give the same command with trial_name=one"


def test_run_that_was_killed_is_as_far_as_its_store_says_whatever_was_exported(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    step(directory, 1)
    with StoreWriter(directory.path) as store:
        for number in (1, 2):
            store.step(StepRecord(number, number, "digest", [], {}, {}))
    main(["status", str(directory.path)])
    assert "stopped after step 2;" in capsys.readouterr().out
    (directory.path / "run.db").write_bytes(b"damaged " * 1000)
    assert main(["status", str(directory.path)]) == RESUMABLE
    assert "stopped after step 1;" in capsys.readouterr().out


def test_run_that_an_error_ended_says_which(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreWriter(directory.path) as store:
        store.session(0, {})
        store.step(StepRecord(1, 1, "digest", [], {}, {}))
        store.event(FAILED, {"error": "ValueError: no such thing"})
    assert main(["status", str(directory.path)]) == RESUMABLE
    assert "failed (ValueError: no such thing) after step 1;" in capsys.readouterr().out


def test_run_whose_driver_was_killed_says_so(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    dead = {"address": "tcp:127.0.0.1:1", "secret": "s", "host": os.uname().nodename, "pid": os.getpid(), "started": 1}
    (directory.path / DRIVER_FILE).write_text(json.dumps(dead))
    assert main(["status", str(directory.path)]) == RESUMABLE
    killed, remedy = capsys.readouterr().out.splitlines()
    assert f"{directory.path}: its driver was killed before its first step" in killed
    assert remedy == "to go on, give the same command with trial_name=one"


@pytest.mark.slow
def test_driver_that_was_killed_is_gone_before_its_parent_has_waited_for_it() -> None:
    child = subprocess.Popen(["sleep", str(DEADLINE_SECONDS)])
    assert start_of(child.pid) > 0
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_of(child.pid) == 0
    child.wait(DEADLINE_SECONDS)


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"pid": 1}'])
def test_run_whose_driver_file_is_damaged_is_told_from_its_other_files(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    (directory.path / DRIVER_FILE).write_text(damaged)
    assert main(["status", str(directory.path)]) == RESUMABLE
    assert "its driver was killed before its first step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "pid", "phrase"),
    [
        (os.uname().nodename, os.getppid(), "runs, but gives no answer"),
        ("elsewhere", 1, "cannot be reached from here"),
    ],
)
def test_driver_that_gives_no_answer_is_not_taken_for_dead(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], host: str, pid: int, phrase: str
) -> None:
    silent = {"address": "tcp:127.0.0.1:1", "secret": "s", "host": host, "pid": pid, "started": start_of(pid)}
    (directory.path / DRIVER_FILE).write_text(json.dumps(silent))
    assert main(["status", str(directory.path)]) == SILENT
    assert phrase in capsys.readouterr().out


def test_finished_run_says_so(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    step(directory, 200)
    directory.finish({"steps": 200})
    assert main(["status", str(directory.path)]) == FINISHED
    assert f"{directory.path}: finished after step 200, 20" in capsys.readouterr().out
    assert main(["status", str(directory.path), "--json"]) == FINISHED
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_directory_of_no_run_is_a_mistake_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "has a config.yaml" in capsys.readouterr().err
