"""Answers why nothing happens in a run: what each of its parts does or waits for, since when, until when at most.

`areal status RUN` asks over a connection whose address is in RUN/driver.json; Ctrl-\\ and SIGUSR1 print the same text
where the run was started. Both work while the trainer computes and while the run's event loop is blocked: the answers
come from a thread of its own, which asks every process at once and waits a moment for each. Nothing is written down
meanwhile, and nothing waits for it.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.messages import Doing
from areal.infra.loop_thread import LoopThread
from areal.infra.rpc.channel import Channel
from areal.infra.rpc.connect import Listener, serve
from areal.infra.rpc.status import ASK_SECONDS
from areal.infra.rpc.wire import api_wire
from areal.infra.status import WatchedLoop, describe, doing_of, line_of_thread
from areal.utils.closing import Closing
from areal.utils.net import is_loopback
from areal.utils.shorten import duration
from areal.utils.waits import Waits

if TYPE_CHECKING:  # these load torch
    from areal.trainer.cluster import Cluster
    from areal.trainer.fleet import Fleet

DRIVER_FILE = "driver.json"
LOOPBACK = "127.0.0.1"
SHOWING_SIGNALS = (signal.SIGQUIT, signal.SIGUSR1)
ANSWER_SECONDS = ASK_SECONDS + 1.0
"""For the answers of all processes together."""
Report = dict[str, Any]
"""What `areal status --json` prints."""


class RunStatus(Closing):
    """Made by the thread that trains. `areal status` finds it while it is open."""

    def __init__(self, run_dir: Path, total_steps: int, host: str | None = None) -> None:
        """`host`: the address of this machine to listen at; None = only this machine may ask."""
        self.trainer = Waits()
        """Of the thread that trains."""
        self.saving = Waits()
        """Of the one that writes checkpoints."""
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._step: Callable[[], int] | None = None
        self._say: Callable[[str], None] = _print
        self._began = time.time()
        self._thread_id = threading.get_ident()
        self._watched: tuple[Cluster, Fleet | None] | None = None
        self._secret = secrets.token_hex(32)
        self._loop = LoopThread("areal status of the run")
        self._listener: Listener | None = None
        self._showing: asyncio.Task[None] | None = None
        self._listen(host or LOOPBACK)
        self._signals = _ShowingSignals(self._loop.loop, self._show)

    def follow(self, step: Callable[[], int], say: Callable[[str], None]) -> None:
        """Training begins: `step()` steps have been taken, and what is printed goes to `say`."""
        self._step, self._say = step, say

    def watch(self, cluster: "Cluster", fleet: "Fleet | None" = None) -> None:
        """Ask these, until `forget`."""
        self._watched = cluster, fleet

    def reachable_at(self, host: str) -> None:
        """The processes of the run reach this machine there; so may whoever asks, from another host."""
        if not is_loopback(host):
            self._listen(host)

    def forget(self) -> None:
        self._watched = None

    async def report(self) -> Report:
        """Call it on the event loop of this object."""
        step = None if self._step is None else self._step()
        parts = [self._trainer(step), doing_of("the checkpoint", self.saving), *await self._cluster()]
        return {
            "run": str(self._run_dir),
            "state": "running",
            "step": step,
            "total_steps": self._total_steps,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "seconds": time.time() - self._began,
            "parts": [asdict(each) for each in parts if each is not None],
        }

    def close(self) -> None:
        self._signals.close()
        with suppress(FileNotFoundError):
            (self._run_dir / DRIVER_FILE).unlink()
        if self._listener is not None:
            self._loop.run(self._listener.close())
        self._loop.close()

    def _listen(self, host: str) -> None:
        before, self._listener = self._listener, self._loop.run(self._serve(host))
        if before is not None:
            self._loop.run(before.close())
        found = {
            "address": self._listener.address,
            "secret": self._secret,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": start_of(os.getpid()),
        }
        path = self._run_dir / DRIVER_FILE
        new = path.with_suffix(".new")
        with open(new, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump(found, file)
        os.replace(new, path)

    async def _serve(self, host: str) -> Listener:
        def on_channel(channel: Channel) -> None:
            channel.handlers["status"] = self.report

        return await serve(
            f"tcp:{host}:0", on_channel, wire=api_wire(), peer="areal status", secret=self._secret.encode()
        )

    def _trainer(self, step: int | None) -> Doing:
        who = "the trainer" if step is None or step >= self._total_steps else f"the trainer, in step {step + 1},"
        waiting = doing_of(who, self.trainer)
        if waiting is not None:
            return waiting
        does = "prepares the run" if step is None else "finishes the run" if who == "the trainer" else "computes"
        line = line_of_thread(self._thread_id)
        return Doing(who, f"{does}, at {line}" if line else does, time.monotonic() - self.trainer.left_at)

    async def _cluster(self) -> list[Doing]:
        """What the parts of the run in other threads and processes do."""
        if self._watched is None:
            return []
        cluster, fleet = self._watched
        watched = WatchedLoop("the driver's event loop", cluster.loop, cluster.thread_id)

        async def look() -> list[Doing]:
            return [*(await fleet.doings() if fleet is not None else ()), *cluster.processes.doings().values()]

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                told, answers = await asyncio.gather(watched.ask(look), cluster.processes.status.ask())
        except (TimeoutError, RuntimeError):  # it is being closed
            return [Doing("the run", "is ending")]
        return [_with_answer(each, answers) for each in told]

    def _show(self) -> None:
        """Print it; on the event loop."""
        if self._showing is None or self._showing.done():
            self._showing = self._loop.loop.create_task(self._print())

    async def _print(self) -> None:
        self._say("\n".join(lines_of(await self.report())))


def _with_answer(doing: Doing, answers: dict[str, list[Doing] | None]) -> Doing:
    if doing.part not in answers:
        return doing
    answer = answers[doing.part]
    if answer is not None:
        return replace(doing, inside=answer)
    if doing.seconds is not None:  # more is known
        return doing
    return replace(
        doing, what=f"gave no answer for {ASK_SECONDS:g} s: it is frozen, or computes and lets no other thread run"
    )


def start_of(pid: int) -> int:
    """When a process of this machine was started, in ticks, which tells it from an earlier one of that number.

    0 = there is none, or this system does not tell. One that has ended, and was not waited for by its parent, is none.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *others = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(others[18])


def lines_of(report: Report, width: int | None = None) -> list[str]:
    """A report as text."""
    step = "before its first step" if report["step"] is None else f"step {report['step']} of {report['total_steps']}"
    head = f"{report['run']}: {step}; driver pid {report['pid']} on {report['host']}, for {duration(report['seconds'])}"
    return [head, *describe(doings_of(report), width)]


def doings_of(report: Report) -> list[Doing]:
    """What the parts of a run do, if its driver said so."""
    return [_doing(each) for each in report["parts"]]


def _doing(values: dict[str, Any]) -> Doing:
    return Doing(**{**values, "inside": [_doing(each) for each in values["inside"]]})


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _ShowingSignals:
    """Ctrl-\\ (SIGQUIT) and SIGUSR1 call a function on an event loop, also while the main thread computes.

    Python runs handlers in the main thread, between two of its instructions. A wakeup descriptor is written to at once;
    if somebody else has it, the handlers must do.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, show: Callable[[], None]) -> None:
        self._loop = loop
        self._show = show
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakes = False
        self._woken, self._waking = socket.socketpair()
        if threading.current_thread() is not threading.main_thread():
            return  # signals are the main thread's
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        before = signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        if before == -1:
            self._wakes = True
            loop.call_soon_threadsafe(loop.add_reader, self._woken, self._read)
        else:
            signal.set_wakeup_fd(before)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in SHOWING_SIGNALS}

    def close(self) -> None:
        for number, before in self._handlers.items():
            signal.signal(number, before)
        if self._wakes:
            signal.set_wakeup_fd(-1)
            self._loop.call_soon_threadsafe(self._loop.remove_reader, self._woken)
        self._loop.call_soon_threadsafe(self._woken.close)
        self._waking.close()

    def _read(self) -> None:
        with suppress(BlockingIOError):
            if any(number in SHOWING_SIGNALS for number in self._woken.recv(4096)):
                self._show()

    def _on_signal(self, number: int, frame: object) -> None:
        if not self._wakes:
            self._loop.call_soon_threadsafe(self._show)
