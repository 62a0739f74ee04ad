"""`python full_disk_run.py DIRECTORY MODEL MOMENT`: a run on a small file system, which is full from a moment on.

It has room again as soon as the run says that it waits for that. Needs a mount namespace of its own.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killed_runs import after, before, check_record, check_weights, run

from areal.store.writer import StoreWriter
from areal.trainer import display, logs, ppo
from areal.trainer.fleet import Fleet

MOMENTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "before a commit": lambda fill: before(StoreWriter, "step", lambda _, record: record.step == 2, fill),
    "before a step is exported": lambda fill: after(Fleet, "publish", lambda _, update: update.version == 2, fill),
    "before a checkpoint": lambda fill: before(ppo._PPORun, "_save", lambda run: run._step == 3, fill),
}


def main(directory: Path, model: Path, moment: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(directory)], check=True, timeout=60)
    filler, filled, lines = directory / "filler", [], []

    def fill() -> None:
        if filled:
            return
        filled.append(moment)
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue

    def watch(owner: Any) -> None:
        say = owner.say

        def watched(*what: Any) -> None:
            say(*what)
            if isinstance(what[-1], str) and "; the run waits for up to" in what[-1]:
                lines.append(what[-1])
                filler.unlink(missing_ok=True)

        owner.say = watched

    watch(display)
    watch(display.Progress)
    MOMENTS[moment](fill)
    run(directory, model)
    assert filled, "the disk was never full"
    assert len(lines) == 1, lines
    check_record(directory / "test/one")
    check_weights(directory, model, directory / "test/one")
    assert (directory / "test/one" / logs.METRICS_FILE).exists()
    print("the record is whole")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
