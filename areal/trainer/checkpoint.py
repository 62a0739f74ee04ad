"""A checkpoint is a directory with a Hugging Face model, its tokenizer and the trainer's state. It is never partial.

A run with a critic has that model in a directory of the checkpoint.

Its manifest lists the size and checksum of every file, so that later damage is found before it is loaded. Checkpoints
without one, from before there were manifests, are loaded if they can be read.
"""

import errno
import hashlib
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from areal.api.errors import ArealError
from areal.engine.training.learner import Learner, Trained
from areal.utils.shorten import first_line

STATE_FILE = "trainer.pt"
MANIFEST_FILE = "manifest.json"
CRITIC_DIRECTORY = "critic"

READ_BYTES = 1 << 22

UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError)
"""What the readers of a model and of a state raise, each in its own way, when bytes are missing or wrong."""


class NoRoom(ArealError):
    """A checkpoint could not be written because the disk is full; nothing of it is left."""


class DamagedCheckpoint(ArealError):
    """A checkpoint is not what was saved; says which file and how."""


def save_checkpoint(
    directory: Path, engine: Learner, tokenizer: Any, state: dict[str, Any], critic: Trained | None = None
) -> None:
    """Write next to the target, then rename: a killed run leaves no partial checkpoint under that name."""
    finish = begin_checkpoint(directory, engine, tokenizer, state, critic)
    if finish is not None:
        finish()


def begin_checkpoint(
    directory: Path, engine: Learner, tokenizer: Any, state: dict[str, Any], critic: Trained | None = None
) -> Callable[[], None] | None:
    """The same with an engine that can go on training meanwhile: what is returned waits and gives it its name.

    None = it is complete.
    """
    if directory.is_dir():
        return None
    temporary = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    with _explained(directory, temporary):
        temporary.mkdir(parents=True)
        tokenizer.save_pretrained(temporary)
        of_critic = {} if critic is None else {"critic": critic.state()}
        torch.save({"engine": engine.state(), "trainer": state, **of_critic}, temporary / STATE_FILE)
        unwritten = [engine.begin_checkpoint(temporary)]
        if critic is not None:
            (temporary / CRITIC_DIRECTORY).mkdir()
            unwritten.append(critic.begin_checkpoint(temporary / CRITIC_DIRECTORY))

    def finish() -> None:
        with _explained(directory, temporary):
            for wait_until_written in filter(None, unwritten):
                wait_until_written()
            _seal(temporary)
            os.rename(temporary, directory)
            _sync(directory.parent)

    if any(unwritten):
        return finish
    finish()
    return None


@contextmanager
def _explained(directory: Path, temporary: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch and safetensors raise their own on a full disk
        kind = NoRoom if _is_full(directory.parent, error) else ArealError
        shutil.rmtree(temporary, ignore_errors=True)
        raise kind(
            f"the checkpoint {directory} cannot be written: {first_line(error)}; the older ones are intact"
        ) from error


def _is_full(directory: Path, error: Exception) -> bool:
    """Whether an error says that its disk is full, or the disk does: not every library names the reason."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return os.strerror(errno.ENOSPC) in str(error) or shutil.disk_usage(directory).free < READ_BYTES


def load_checkpoint(directory: Path, engine: Learner, critic: Trained | None = None) -> dict[str, Any]:
    """Restore the engine and the critic; returns the trainer's state.

    A critic that was not saved stays as it is. Raises DamagedCheckpoint if a file is not what was saved.
    """
    if _has_manifest(directory):
        check_files(directory)
        return _load(directory, engine, critic)
    try:
        return _load(directory, engine, critic)
    except (ArealError, *UNREADABLE) as error:  # without a manifest, only loading shows the damage
        reason = first_line(error) or type(error).__name__
        raise DamagedCheckpoint(f"it cannot be read: {reason}") from error


def load_newest(
    checkpoints: Sequence[Path], engine: Learner, critic: Trained | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Restore the newest of them (oldest first) that is intact; returns the trainer's state and what to tell the user.

    Newer ones that are damaged are moved aside, because the run will reach their steps again.
    """
    damaged: list[tuple[Path, DamagedCheckpoint]] = []
    for directory in reversed(checkpoints):
        try:
            state = load_checkpoint(directory, engine, critic)
        except DamagedCheckpoint as error:
            damaged.append((directory, error))
        else:
            return state, [_set_aside(each, why, directory.name) for each, why in damaged]
    newest, why = damaged[0]
    raise ArealError(
        f"no checkpoint in {newest.parent} is intact (the newest, {newest.name}: {why}); put one back, or choose "
        "another trial_name to start over"
    )


def checkpoint_digest(directory: Path) -> str:
    """Of the manifest, and so of every file."""
    return hashlib.sha256((directory / MANIFEST_FILE).read_bytes()).hexdigest()[:32]


def _seal(directory: Path) -> None:
    """Write the manifest, and make sure that all of it is on the disk."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(directory)): {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in files
    }
    (directory / MANIFEST_FILE).write_text(json.dumps({"files": manifest}, indent=2) + "\n", encoding="utf-8")
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _has_manifest(directory: Path) -> bool:
    return (directory / MANIFEST_FILE).exists()


def check_files(directory: Path) -> None:
    """Raises DamagedCheckpoint if the files are not those that the manifest lists."""
    try:
        files = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))["files"]
        expected = {name: (int(each["bytes"]), str(each["crc32"])) for name, each in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpoint(f"{MANIFEST_FILE} cannot be read") from None
    for name, (size, checksum) in expected.items():
        try:
            found = (directory / name).stat().st_size
            if found != size:
                raise DamagedCheckpoint(f"{name} has {found:,} bytes, {size:,} were saved")
            if _crc32(directory / name) != checksum:
                raise DamagedCheckpoint(f"the bytes of {name} have changed since it was saved")
        except OSError as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror}") from error


def _load(directory: Path, engine: Learner, critic: Trained | None) -> dict[str, Any]:
    saved = torch.load(directory / STATE_FILE, weights_only=True)
    engine.load_checkpoint(directory, saved["engine"])
    if critic is not None and "critic" in saved:
        critic.load_checkpoint(directory / CRITIC_DIRECTORY, saved["critic"])
    state: dict[str, Any] = saved["trainer"]
    return state


def _set_aside(directory: Path, why: DamagedCheckpoint, used: str) -> str:
    aside = directory.with_name(f"damaged-{directory.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(directory, aside)
    return f"the checkpoint {directory.name} is damaged ({why}) and kept as {aside.name}; {used} is used instead"


def _crc32(path: Path) -> str:
    """Detects corruption, not tampering. A disk is much slower than this, so saving takes hardly longer."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def _sync(path: Path) -> None:
    """Make sure that a file's bytes, or a directory's names, are on the disk before the next step."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
