"""The viewer beside a run, if `viewer.port` is set: a process of its own, which reads the store and costs no step.

The driver starts it, says its address and forgets it. It ends when its input does, so it never outlives the driver.
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from areal.utils.closing import Closing

CLOSE_SECONDS = 5.0


class RunViewer(Closing):
    def __init__(self, directory: Path, host: str, port: int, say: Callable[[str], None]) -> None:
        """`say` gets its address, or why there is none, from another thread."""
        # By its name: the package is above this one.
        command = [sys.executable, "-m", "areal.viewer", str(directory.absolute()), host, str(port)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run
        )
        self._say = say
        self._reader = threading.Thread(target=self._read, name="viewer", daemon=True)
        self._reader.start()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
        self._reader.join(CLOSE_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = line.strip()
            self._say(f"look at it  {said}" if said.startswith("http") else said)
