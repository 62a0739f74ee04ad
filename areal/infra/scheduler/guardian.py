"""The driver's end of the guardian process: which process groups must not outlive the driver.

A parent-death signal would not do: it is tied to the thread that forked, not to the process, and spares grandchildren.
"""

import subprocess
import sys
from contextlib import suppress

from areal.api.errors import ProcessDied
from areal.infra.scheduler import guardian_process

STOP_SECONDS = 5.0


class Guardian:
    def __init__(self) -> None:
        # Its own session: a Ctrl-C or a kill that is meant for the driver's group must not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int) -> None:
        try:
            self._write(f"+{group}\n")
        except BrokenPipeError:
            raise ProcessDied(
                f"the guardian (pid {self.pid}) is gone, and with it the promise that no process outlives the driver"
            ) from None

    def release(self, group: int) -> None:
        with suppress(BrokenPipeError):  # without a guardian there is nothing to release
            self._write(f"-{group}\n")

    def close(self) -> None:
        """End the guardian; whatever it still watches is killed."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
