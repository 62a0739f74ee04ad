"""Processes that say when they are ready, and ways to see them end."""

import asyncio
import os
import sys
from pathlib import Path

REPORT = """
import os, signal, socket, subprocess, sys

def report(*numbers):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["REPORT"])
        connection.sendall(" ".join(map(str, numbers)).encode())
"""
SLEEP = REPORT + "report(os.getpid()); signal.pause()"
STUBBORN = REPORT + "signal.signal(signal.SIGTERM, signal.SIG_IGN); report(os.getpid()); signal.pause()"
WITH_CHILD = REPORT + f"subprocess.run([sys.executable, '-c', {STUBBORN!r}])"
WITH_ESCAPEE = (
    REPORT
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    parent = os.getpid()
    if os.fork() == 0:
        os.setsid()
        while os.getppid() == parent:
            os.sched_yield()
        report(os.getpid(), os.getppid())
        while True:
            signal.pause()
    os._exit(0)
os.wait()
while True:
    signal.pause()
"""
)
"""Ignores SIGTERM, and so does its grandchild, a daemon: an orphan that leads a session of its own.

It reports once it has been adopted."""


class Reports:
    """What processes say when they are ready."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._queue: asyncio.Queue[list[int]] = asyncio.Queue()

    async def listen(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._receive, self.path)

    async def next(self) -> list[int]:
        return await asyncio.wait_for(self._queue.get(), 60)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._queue.put_nowait([int(number) for number in (await reader.read()).split()])
        writer.close()


async def wait_until_gone(pid: int, seconds: float = 30.0) -> None:
    """Return when that process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), seconds)
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


def is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def start_driver(code: str, *arguments: str) -> asyncio.subprocess.Process:
    """A process that runs `code`, in a session of its own."""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments, start_new_session=True)
