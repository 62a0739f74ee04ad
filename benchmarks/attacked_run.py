"""A run of `areal train` that is attacked, as `benchmarks.survival` and `benchmarks.recovery` see it from outside.

Its processes are found by a variable of their environment, its shared memory by the notes that `benchmarks.attacked`
takes. What should never be there once a run has ended is added up in a `Damage`.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.utils.closing import Closing
from benchmarks.attacked import MOMENT, SAMPLED

CONFIG = Path(__file__).parents[1] / "examples/agent_workflow/config.yaml"
BATCH, SAMPLES = 2, 4
TOKEN = "AREAL_ATTACKED_TOKEN"
"""An environment variable that every process of a run has, wherever it has got to."""
ENGINE, WORKER, KEEPER = "areal.engine.inference.server", "areal.rollout.worker", "scheduler/keeper.py"
"""What the command lines of processes have."""
END_SECONDS = 15.0
"""What a run leaves behind is gone by then."""
HANG_SECONDS = 300.0
"""Without a new step."""
DEATH = re.compile(
    r"\b(engine|rollout worker \d+) \(pid (\d+)\) (was killed by|was frozen|was lost with|exited with code \d+)"
)
MAX_FAILED_RUNS = 3
"""Then runs are broken by something else than attacks."""
SHOWN_CHARACTERS = 2000
"""Of the output of a run that went wrong."""
SMALL = (
    f"gconfig.n_samples={SAMPLES}",
    f"train_dataset.batch_size={BATCH}",
    "valid_dataset.size=2",
    "evaluator.freq_steps=null",
    "evaluator.greedy=false",
    "saver.freq_steps=2",
    "scheduler.max_restarts=1000000",
    "scheduler.heartbeat_seconds=2",
    f"rollout.max_concurrent_rollouts={4 * SAMPLES}",
)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class Damage:
    """What runs have suffered that they should not; `runs` and the attacks on them are for scale."""

    runs: int = 0
    attacks: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    """How often a driver was started again: it was killed, or a process was that it could not begin without."""
    restarts: int = 0
    """Of engines and workers."""
    rejections: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    failed_runs: int = 0
    engine_deaths: int = 0
    """Of engines that no one attacked."""
    worker_deaths: int = 0
    lost_groups: int = 0
    doubled_groups: int = 0
    orphans: int = 0
    leaked_shared_memory: int = 0
    leaked_directories: int = 0
    seconds: float = 0.0


class AttackedRun(Closing):
    """A run of `areal train` in a directory of its own, and what can be seen of it from outside."""

    def __init__(self, place: Path, steps: int, workflow: str, *settings: str) -> None:
        self.place = place
        self.steps = steps
        self.directory = place / "runs" / "sort-digits" / "one"
        self.sampled = place / "sampled"
        """Where agents write down what they have sampled (`benchmarks.attacked.TwoTurns`)."""
        self.attacked: set[int] = set()
        self._token = secrets.token_hex(16)
        self._temporary = place / "tmp"
        self._temporary.mkdir(parents=True)
        words = ["train", "--config", str(CONFIG), "trial_name=one", f"output_dir={place / 'runs'}"]
        self._words = [*words, *SMALL, f"workflow={workflow}", f"total_train_steps={steps}", *settings]
        self.start()

    def start(self, moment: str = "") -> None:
        """Also again: then it goes on. `moment`: when it kills itself (`benchmarks.attacked`)."""
        argv = [sys.executable, "-m", "benchmarks.attacked", str(self.place / "notes"), *self._words]
        own = {TOKEN: self._token, SAMPLED: str(self.sampled), MOMENT: moment, "TMPDIR": str(self._temporary)}
        with open(self.place / "output", "ab") as output:
            self.driver = subprocess.Popen(
                argv,
                cwd=CONFIG.parents[2],
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def processes(self) -> dict[int, str]:
        """Every process of the run that has not ended: pid -> command line."""
        return {pid: command for pid, command, environment in _processes() if self._token in environment}

    def find(self, module: str) -> list[int]:
        return sorted(pid for pid, command in self.processes().items() if module in command)

    def attack(self, pid: int, sign: signal.Signals) -> None:
        self.attacked.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, sign)

    def wait(self, seconds: float) -> int | None:
        """The driver's exit code; None if it has not ended by then. One that is killed after its last word is done."""
        try:
            code = self.driver.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return 0 if code == -signal.SIGKILL and self.is_finished else code

    def wait_for_step(self) -> int | None:
        """Until one more step is recorded; the exit code if it ends before that. Raises TimeoutError if it hangs."""
        seen = self.steps_recorded()
        return self.wait_until(lambda: self.steps_recorded() != seen)

    def wait_until(self, condition: Callable[[], bool], look_seconds: float = 0.2) -> int | None:
        """The same for any condition, which is looked at every so often."""
        deadline = time.monotonic() + HANG_SECONDS
        while (code := self.wait(look_seconds)) is None and not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step within {HANG_SECONDS:.0f} s")
        return code

    def wait_to_end(self) -> int:
        """The exit code. Raises TimeoutError if it hangs."""
        while (code := self.wait_for_step()) is None:
            pass
        return code

    def left_behind(self) -> tuple[dict[int, str], list[str], list[str]]:
        """Processes, shared memory and directories that are there although the driver has ended."""
        deadline = time.monotonic() + END_SECONDS
        while any(left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def close(self) -> None:
        """End what is left of it: that of a run that hangs, or of a benchmark that was interrupted."""
        while processes := self.processes():
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.driver.wait()

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.directory / name)

    @property
    def output(self) -> str:
        return (self.place / "output").read_text(errors="replace")

    @property
    def is_finished(self) -> bool:
        return (self.directory / "summary.json").exists()

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return summary

    def steps_recorded(self) -> int:
        return len(self.lines("metrics.jsonl"))

    def _left(self) -> tuple[dict[int, str], list[str], list[str]]:
        notes = self.place / "notes"
        made = notes.read_text().split() if notes.exists() else []
        directories = [str(path) for path in self._temporary.glob("areal-*")]
        return self.processes(), [path for path in made if os.path.exists(path)], directories


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Those that are whole, of a file of JSON lines."""
    whole = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in whole if line.endswith(b"\n")]


def _processes() -> Iterator[tuple[int, str, str]]:
    """Number, command line and environment of each process that can be looked at; zombies have neither."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
                yield (
                    int(entry.name),
                    command.replace(b"\0", b" ").decode(errors="replace"),
                    environment.decode("latin-1"),
                )


def note_end(run: AttackedRun, code: int | None, damage: Damage, expected_end: str = "") -> None:
    """How the run has ended, with which exit code (None = it hangs), and what it has left behind.

    `expected_end`: how workers may end without an attack.
    """
    if code is None:
        damage.hangs += 1
        progress(
            f"no step within {HANG_SECONDS:.0f} s; {len(run.processes())} processes\n{run.output[-SHOWN_CHARACTERS:]}"
        )
        run.close()
    elif code != 0:
        damage.failed_runs += 1
        progress(f"the run ended with code {code}:\n{run.output[-SHOWN_CHARACTERS:]}")
    note_leftovers(run, damage)
    note_deaths(run, damage, expected_end)
    if code == 0:
        damage.rejections += Counter(run.summary["rejections"])
    damage.runs += 1


def note_leftovers(run: AttackedRun, damage: Damage) -> None:
    processes, shared_memory, directories = run.left_behind()
    damage.orphans += len(processes)
    damage.leaked_shared_memory += len(shared_memory)
    damage.leaked_directories += len(directories)
    if processes or shared_memory or directories:
        progress(f"left behind: {processes} {shared_memory} {directories}")
        for path in (*shared_memory, *directories):
            shutil.rmtree(path, ignore_errors=True)  # so that it is counted once
        run.close()


def note_deaths(run: AttackedRun, damage: Damage, expected_end: str) -> None:
    deaths = {int(pid): (name, how) for name, pid, how in DEATH.findall(run.output)}
    damage.restarts += len(deaths)
    unexpected = {pid: death for pid, death in deaths.items() if pid not in run.attacked}
    engines = [pid for pid, (name, _) in unexpected.items() if name == "engine"]
    workers = [pid for pid, (name, how) in unexpected.items() if name != "engine" and how != expected_end]
    damage.engine_deaths += len(engines)
    damage.worker_deaths += len(workers)
    if engines or workers:
        progress(f"died without an attack: {unexpected}\n{run.output[-SHOWN_CHARACTERS:]}")


def go_on(run: AttackedRun, damage: Damage, moment: str = "") -> None:
    """Give the command again, once the driver has ended before its last step and taken everything with it."""
    run.driver.wait()
    note_leftovers(run, damage)
    if not run.is_finished:
        damage.resumed += 1
        run.start(moment)
