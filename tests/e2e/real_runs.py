"""Start real runs as a user does, follow what they print, read what they leave, and see their processes end."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import areal

ROOT = Path(areal.__file__).parents[1]
SCRIPT = ROOT / "examples/agent_workflow/train.py"
CONFIG = ROOT / "examples/agent_workflow/config.yaml"
SMALL = (
    "gconfig.n_samples=4",
    "train_dataset.batch_size=4",
    "valid_dataset.size=16",
    "evaluator.freq_steps=null",
    "saver.freq_steps=null",
    "rollout.num_workers=1",
)
"""Settings that make an example as small as it can be."""
COMPARED = ("actor.kl_ctl=0.001", "ref.path=builtin:tiny-math")
"""Settings with which engine and trainer are sure to be compared: a divergence counts for every token, an advantage
only for those of groups whose rewards differ."""
START_SECONDS = 200.0
"""Three interpreters load torch, possibly on one busy core."""
END_SECONDS = 40.0
"""Within this time a run has ended after one of its processes was killed, also on a busy machine."""


class Run:
    """A command that was started in a session of its own, and everything it has printed."""

    def __init__(self, argv: Sequence[str | Path], cwd: Path) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, *map(str, argv)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, seconds: float = START_SECONDS) -> str:
        """The first line that `pattern` is found in; waits for it."""
        found: list[str] = []

        def found_or_ended() -> bool:
            found[:] = [line for line in self.lines if re.search(pattern, line)]
            return bool(found) or self._ended

        with self._changed:
            assert self._changed.wait_for(found_or_ended, seconds), (
                f"no {pattern!r} within {seconds} s in:\n{self.text}"
            )
        assert found, f"the run ended without {pattern!r}:\n{self.text}"
        return found[0]

    def wait(self, seconds: float = START_SECONDS) -> int:
        """The exit code."""
        code = self._process.wait(seconds)
        self._reader.join(seconds)
        return code

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def descendants(self) -> dict[int, str]:
        """Every process below this one: pid -> command line."""
        parents = dict(_parents())
        below, grown = {self.pid}, True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in below} - below
            grown, below = bool(more), below | more
        return {pid: _command(pid) for pid in below - {self.pid}}

    def only(self, word: str) -> int:
        """The one process below this one whose command line has `word`."""
        (pid,) = [pid for pid, command in self.descendants().items() if word in command]
        return pid

    def wait_for_process(self, word: str, seconds: float = START_SECONDS) -> int:
        """The same as soon as it is there."""
        deadline = time.monotonic() + seconds
        while True:
            found = [pid for pid, command in self.descendants().items() if f"-m {word}" in command]
            if found:
                return found[0]
            assert time.monotonic() < deadline, f"no process {word} within {seconds} s:\n{self.text}"
            time.sleep(0.01)  # nothing announces it

    def end(self) -> None:
        """Kill what is left, for a test that failed."""
        for pid in [*self.descendants(), self.pid] if self._process.poll() is None else []:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


Start = Callable[..., Run]


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def sides_agree(summary: dict[str, Any]) -> bool:
    """Engine and trainer were compared, and compute the same."""
    difference = summary["max_logprob_difference"]
    return difference is not None and difference < 1e-4


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Witness:
    """Keeps handles on processes, so that a test can wait for their end even if their parent is gone."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._handles = {pid: os.pidfd_open(pid) for pid in pids}

    def survivors(self, seconds: float) -> dict[int, str]:
        """Those that have not ended after `seconds`."""
        deadline = time.monotonic() + seconds
        left = dict(self._handles)
        while left and (rest := deadline - time.monotonic()) > 0:
            ended, _, _ = select.select(left.values(), [], [], rest)
            left = {pid: handle for pid, handle in left.items() if handle not in ended}
        for handle in self._handles.values():
            os.close(handle)
        return {pid: _command(pid) for pid in left}


def _parents() -> Iterable[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since
            yield int(entry.name), int(stat.rpartition(")")[2].split()[1])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
