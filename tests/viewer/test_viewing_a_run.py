"""The viewer beside a run is a process of its own: it serves while the driver is there, and ends with it."""

import os
import queue
import select
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from areal.api.cli_args import ConfigError, ViewerConfig
from areal.trainer.viewing import RunViewer
from tests.viewer.viewed_runs import write_run

SECONDS = 60.0

pytestmark = pytest.mark.slow


def test_it_serves_the_run_and_ends_when_it_is_closed(tmp_path: Path) -> None:
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    with RunViewer(write_run(tmp_path / "small" / "one"), "127.0.0.1", 0, said.put):
        url = said.get(timeout=SECONDS).removeprefix("look at it  ")
        assert "small/one" in httpx.get(url, trust_env=False, timeout=SECONDS).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False, timeout=SECONDS)


def test_a_port_that_is_taken_is_told_and_ends_nothing(tmp_path: Path) -> None:
    run, said = write_run(tmp_path / "small" / "one"), queue.SimpleQueue[str]()
    with RunViewer(run, "127.0.0.1", 0, said.put):
        port = int(said.get(timeout=SECONDS).rstrip("/").rpartition(":")[2])
        with RunViewer(run, "127.0.0.1", port, said.put):
            assert "the viewer cannot listen" in said.get(timeout=SECONDS)


def test_it_does_not_outlive_a_killed_driver(tmp_path: Path) -> None:
    run = write_run(tmp_path / "small" / "one")
    driver = (
        "import queue, sys; from pathlib import Path\n"
        "from areal.trainer.viewing import RunViewer\n"
        "said = queue.SimpleQueue()\n"
        "viewer = RunViewer(Path(sys.argv[1]), '127.0.0.1', 0, said.put)\n"
        "print(said.get(timeout=60), viewer._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", driver, str(run)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[-1])
        ended = os.pidfd_open(pid)
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
    assert select.select([ended], [], [], SECONDS)[0], "the viewer outlives its driver"
    os.close(ended)


@pytest.mark.parametrize("wrong", [{"port": -1}, {"port": 70000}, {"host": ""}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="got"):
        ViewerConfig(**wrong)  # type: ignore[arg-type]
