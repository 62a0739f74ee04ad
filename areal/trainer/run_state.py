"""What is known of a run by those who did not start it: its driver is asked, or its files tell.

The driver's address is in RUN/driver.json, which only the user who started it can read. A run without a driver is told
from its files: finished, failed, stopped or killed, at which step and when, and how to go on with it.
"""

import asyncio
import json
import re
import socket
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.errors import ArealError
from areal.infra.rpc.channel import ChannelClosed
from areal.infra.rpc.connect import connect
from areal.infra.rpc.wire import api_wire
from areal.store.reader import StoreReader
from areal.store.schema import StoreError
from areal.trainer.status import ANSWER_SECONDS, DRIVER_FILE, Report, start_of

CONNECT_SECONDS = 5.0
READ_BYTES = 1 << 16
"""Of the end of metrics.jsonl: more than a row."""


def report_of(directory: Path) -> Report:
    """What the driver says, or the files; `state` is running, silent, finished, failed, stopped or killed."""
    return _ask(directory) or _from_files(directory)


def state_of(directory: Path) -> str:
    """`state` without asking anybody, so at once; a driver on another host is taken at its word."""
    try:
        driver = _driver(directory)
    except ArealError:  # somebody else's run
        return "running"
    if driver is not None and driver.lives is not False:
        return "running"
    return _ended(directory)


@dataclass(frozen=True)
class _Driver:
    """What driver.json says of the process that trains the run."""

    address: str
    secret: str
    host: str
    pid: int
    started: int
    """As `start_of` says it."""

    @property
    def lives(self) -> bool | None:
        """Whether it still runs; None = it is on another host, so one cannot tell."""
        return None if self.host != socket.gethostname() else start_of(self.pid) == self.started != 0


def _driver(directory: Path) -> _Driver | None:
    path = directory / DRIVER_FILE
    try:
        return _Driver(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # or what is there is damaged
        return None
    except PermissionError:
        raise ArealError(f"only the user who started the run may ask it, and read {path}") from None


def _ask(directory: Path) -> Report | None:
    """What the run's driver says; None = there is none."""
    driver = _driver(directory)
    if driver is None:
        return None
    try:
        report: Report = asyncio.run(_call(driver))
    except (ChannelClosed, TimeoutError) as error:
        if driver.lives is False:
            return None
        where = f"pid {driver.pid} on {driver.host}"
        if driver.lives:
            text = f"{directory}: the driver ({where}) runs, but gives no answer: {error}; it may be stopped (SIGSTOP)"
        else:
            text = f"{directory}: its driver ({where}) cannot be reached from here: {error}; ask on {driver.host}"
        return {"run": str(directory), "state": "silent", "host": driver.host, "pid": driver.pid, "text": text}
    return {**report, "run": str(directory)}


async def _call(driver: _Driver) -> Any:
    channel = await connect(
        driver.address,
        wire=api_wire(),
        peer="the driver",
        secret=driver.secret.encode(),
        timeout_seconds=CONNECT_SECONDS,
    )
    try:
        return await channel.call("status", timeout_seconds=2 * ANSWER_SECONDS)
    finally:
        await channel.close()


def _from_files(directory: Path) -> Report:
    """What is known of a run without a driver."""
    metrics, summary = directory / "metrics.jsonl", directory / "summary.json"
    step = max(_stored_step(directory), _exported_step(metrics))
    report: Report = {"run": str(directory), "step": step, "checkpoint": _newest_checkpoint(directory)}
    if summary.exists():
        report |= {"state": "finished", "ended": summary.stat().st_mtime}
        report["text"] = f"{directory}: finished after step {report['step']}, {_when(report['ended'])}"
        return report
    latest = metrics if metrics.exists() else directory / "config.yaml"
    report |= {"state": _ended(directory), "ended": latest.stat().st_mtime}
    how = {"killed": "its driver was killed", "failed": f"failed ({failure_of(directory)})"}.get(
        report["state"], "stopped"
    )
    after = f"after step {report['step']}" if report["step"] else "before its first step"
    report["text"] = (
        f"{directory}: {how} {after}; the last sign of it is of {_when(report['ended'])}\n"
        f"to go on, give the same command with trial_name={directory.absolute().name}"
    )
    return report


def _ended(directory: Path) -> str:
    """How a run without a driver ended."""
    if (directory / "summary.json").exists():
        return "finished"
    if (directory / DRIVER_FILE).exists():
        return "killed"
    return "stopped" if failure_of(directory) is None else "failed"


def failure_of(directory: Path) -> str | None:
    """The error that ended a run; None = none did, or there is no store that can be read."""
    try:
        with StoreReader(directory, at_rest=True) as store:
            return store.failure()
    except (StoreError, sqlite3.DatabaseError):
        return None


def _stored_step(directory: Path) -> int:
    """The last one that is written down; 0 = there is none, or no store that can be read."""
    try:
        with StoreReader(directory, at_rest=True) as store:
            return max((each.step for each in store.steps()), default=0)
    except (StoreError, sqlite3.DatabaseError):
        return 0


def _exported_step(metrics: Path) -> int:
    """Of the last whole row; 0 = there is none."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - READ_BYTES))
        steps = re.findall(rb'^\{"step": ?(\d+)', file.read(), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def _newest_checkpoint(directory: Path) -> int:
    """Its step; 0 = there is none."""
    found = (re.fullmatch(r"step-(\d{6,})", path.name) for path in (directory / "checkpoints").glob("step-*"))
    return max((int(match[1]) for match in found if match), default=0)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
