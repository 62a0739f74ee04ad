"""The directory of one run: which process may write to it, what is in it, and whether it may be resumed.

    RUN/run.db  config.yaml  metrics.jsonl  rollouts.jsonl  tensorboard/  logs/  checkpoints/step-000050/
        held_out.json  reward_curve.png  summary.json

A run that has a summary is finished, and no other run ever overwrites anything in it.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from areal.api.errors import ArealError, RunExists
from areal.config.experiment import ExperimentConfig
from areal.config.loader import to_dict
from areal.trainer.logs import METRICS_FILE
from areal.utils.closing import Closing

CHECKPOINT_NAME = re.compile(r"step-\d{6,}")


class RunDirectory(Closing):
    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, config: ExperimentConfig) -> "RunDirectory":
        """Make or take over the directory. Raises RunExists if its run is finished, in use, or must not be resumed."""
        trial = config.trial_name or time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
        path = Path(config.output_dir) / config.experiment_name / trial
        name = f"{config.experiment_name}/{trial}"
        refuse_existing(path, config)
        with explained_storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path, _lock(path, name))
            try:
                run._refuse_lost_checkpoints(name)
                (path / "checkpoints").mkdir(exist_ok=True)
                run.logs.mkdir(mode=0o700, exist_ok=True)
                run.logs.chmod(0o700)  # an earlier run may have made it
                if not (path / "config.yaml").exists():  # a resumed run may yet be refused
                    run.write_config(config)
            except BaseException:
                run.close()
                raise
        return run

    def write_config(self, config: ExperimentConfig) -> None:
        write_atomically(self.path / "config.yaml", yaml.safe_dump(without_secrets(config), sort_keys=False))

    @property
    def logs(self) -> Path:
        """For the owner only: a log may hold an admin key that was made for the run."""
        return self.path / "logs"

    @property
    def held_out(self) -> Path:
        """What was measured before the first step, which a resumed run compares with too."""
        return self.path / "held_out.json"

    @property
    def curve(self) -> Path:
        return self.path / "reward_curve.png"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    def checkpoints(self) -> list[Path]:
        """Complete ones, oldest first."""
        return list(find_checkpoints(self.path).values())

    def note_saved(self) -> None:
        """There is a checkpoint: from now on, a run without one has lost it."""
        (self.path / ".saved").touch()

    def prune(self, keep: int) -> int:
        """Remove all checkpoints but the newest; returns the step of the oldest that is left."""
        found = self.checkpoints()
        for old in found[:-keep]:
            shutil.rmtree(old)
        return _step_of(found[-keep:][0])

    def finish(self, summary: dict[str, Any]) -> None:
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Let another process have the directory."""
        self._lock.close()

    def _refuse_lost_checkpoints(self, name: str) -> None:
        """A run that was killed before its first checkpoint starts over; one whose checkpoints are lost must not."""
        if self.checkpoints():
            return
        # Every run makes the directory before it writes anything down.
        deleted = not (self.path / "checkpoints").is_dir() and _has_content(self.path / METRICS_FILE)
        if deleted or (self.path / ".saved").exists():
            raise RunExists(
                f"the run {name} has a record of its steps but no checkpoint to go on from ({self.path}); put "
                "checkpoints/ back, or to start over choose another trial_name or remove the directory of the run"
            )


def refuse_existing(path: Path, config: ExperimentConfig) -> None:
    """Raises RunExists if the run there is finished, or must not be resumed."""
    name = f"{path.parent.name}/{path.name}"
    if (path / "summary.json").exists():
        raise RunExists(f"the run {name} is finished and is not overwritten ({path}); choose another trial_name")
    if (path / "config.yaml").exists() and config.recover.mode == "off":
        raise RunExists(f"the run {name} exists ({path}); choose another trial_name, or set recover.mode=auto")


def find_checkpoints(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by their step, oldest first; other directories are ignored."""
    found = (run / "checkpoints").glob("step-*")
    ours = {_step_of(path): path for path in found if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()}
    return dict(sorted(ours.items()))


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _lock(path: Path, name: str) -> IO[str]:
    lock = open(path / ".lock", "w")  # noqa: SIM115  (held for the life of the run)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise RunExists(
            f"the run {name} is being trained by another process ({path}); choose another trial_name"
        ) from None
    return lock


def without_secrets(config: ExperimentConfig) -> dict[str, Any]:
    """The settings without credentials, which must not end up on a disk."""
    values = to_dict(config)
    if values.get("proxy", {}).get("admin_key"):
        values["proxy"]["admin_key"] = ""
    return values


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


STORAGE_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST,
    errno.EIO, errno.ENAMETOOLONG, errno.EISDIR,
}  # fmt: skip


@contextmanager
def explained_storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about storage into one line for the user, who can free space or choose another directory."""
    try:
        yield
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        raise ArealError(f"cannot write to {path}: {error.strerror}; free some space or set output_dir") from error
