"""`areal train` outside a Slurm allocation: the same command as a batch job, whose log is shown until it ends.

Ctrl-C asks the job to end as it would at a terminal, with a checkpoint; a second one cancels it. The job goes on if
this process is killed: it belongs to Slurm.
"""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from areal.api.errors import PlacementRefused

LOOK_SECONDS = 1.0
"""How often Slurm is asked for the job's state; it does not announce changes."""
COMMAND_SECONDS = 60.0
NOT_ENDED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")


def submit(argv: Sequence[str], options: Sequence[str], directory: Path) -> int:
    """Run `argv` as a batch job with these options of `sbatch`; returns its exit code. Its log goes to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory.absolute() / "slurm-%j.log"
    script = f"#!/bin/sh\nexec {shlex.join(argv)}\n"
    job = _slurm("sbatch", "--parsable", f"--output={log}", *options, script=script).partition(";")[0].strip()
    log = Path(str(log).replace("%j", job))
    print(f"submitted as Slurm job {job}; its log is {log}", flush=True)
    return _follow(job, log)


def _follow(job: str, log: Path) -> int:
    """Show the log as it grows, until the job has ended."""
    shown, interrupted, said, state = 0, False, "", "PENDING"
    while True:
        try:
            state, reason = _state(job)
            shown = _show(log, shown)
            if state not in NOT_ENDED:
                break
            if state == "PENDING" and reason != said:
                said = reason
                print(f"job {job} waits for its nodes ({reason}); Ctrl-C takes it back", flush=True)
            time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            # The signal goes to the batch shell, which exec has made the driver. A job that waits has none.
            begun = state != "PENDING"
            _slurm("scancel", *(["--batch", "--signal=INT"] if begun and not interrupted else []), job)
            interrupted = True
    if not log.exists():
        print(f"its log was not found here: {log} is on the node where it ran", flush=True)
    return _exit_code(job, state)


def _show(log: Path, start: int) -> int:
    """Print what the log has beyond `start`; returns how much it has."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(start)
        new = file.read()
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()
        return start + len(new)
    return start


def _state(job: str) -> tuple[str, str]:
    """The job's state, and why it waits if it does."""
    shown = _slurm("scontrol", "--oneliner", "show", "job", job)
    state, reason = re.search(r"JobState=(\S+)", shown), re.search(r"Reason=(\S+)", shown)
    return state[1] if state else "UNKNOWN", reason[1] if reason else ""


def _exit_code(job: str, state: str) -> int:
    shown = _slurm("scontrol", "--oneliner", "show", "job", job)
    found = re.search(r"\bExitCode=(\d+):(\d+)", shown)
    code, number = (int(found[1]), int(found[2])) if found else (1, 0)
    if state != "COMPLETED":
        print(f"Slurm job {job} ended as {state.lower()}", file=sys.stderr)
    return code or (128 + number if number else int(state != "COMPLETED"))


def _slurm(*argv: str, script: str | None = None) -> str:
    try:
        done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except FileNotFoundError:
        raise PlacementRefused(f"scheduler.type=slurm needs Slurm's programs, and there is no {argv[0]} here") from None
    except subprocess.TimeoutExpired:
        raise PlacementRefused(f"{argv[0]} did not answer within {COMMAND_SECONDS:g} s; is slurmctld up?") from None
    if done.returncode:
        raise PlacementRefused(f"{argv[0]} failed: {done.stderr.strip()}")
    return done.stdout
