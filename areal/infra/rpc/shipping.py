"""What a process on another host fetches from the driver: the small files of a model, and published weights.

So nothing needs a shared file system. A process first looks whether a path is there: on the driver's own host, or where
file systems are shared, nothing travels. What it fetches goes to a directory that its keeper removes.
"""

import asyncio
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from areal.api.engine_api import WeightShard, WeightUpdate
from areal.api.errors import ArealError, ModelError, WeightMismatch
from areal.infra.rpc.channel import Channel, Handler

SCRATCH_VARIABLE = "AREAL_SCRATCH"
"""Names the directory of a process that its keeper made and removes."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Files that do not travel with a model: its weights come when they are published."""
MAX_FILES_BYTES = 128 << 20
CHUNK_BYTES = 8 << 20
FETCH_SECONDS = 120.0
"""For one message; published weights travel in many."""
_FILES, _WEIGHTS = "model_files", "read_weights"


class Shipper:
    """The driver's end."""

    def __init__(self, directories: Iterable[Path]) -> None:
        """`directories`: the models and tokenizers that may be asked for."""
        self._directories = {str(directory): directory for directory in directories}
        self.published: WeightUpdate | None = None

    @property
    def handlers(self) -> dict[str, Handler]:
        return {_FILES: self._files, _WEIGHTS: self._read}

    def _files(self, directory: str) -> dict[str, bytes]:
        """Every file of the directory but weights."""
        if directory not in self._directories:
            raise ModelError(f"{directory!r} is no directory of this run")
        if not is_here(self._directories[directory]):
            raise ModelError(f"there is no model at {directory!r}, neither here nor on the driver's host")
        files: dict[str, bytes] = {}
        for path in sorted(self._directories[directory].iterdir()):
            if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and not path.name.startswith("."):
                files[path.name] = path.read_bytes()
        size = sum(map(len, files.values()))
        if size > MAX_FILES_BYTES:
            raise ModelError(
                f"the files of {directory} without its weights must have at most {MAX_FILES_BYTES} bytes, got {size}; "
                "remove what does not belong to the model"
            )
        return files

    def _read(self, version: int, name: str, start: int) -> bytes:
        """A piece of a shard of the weights that were published last."""
        update = self.published
        if update is None or update.version != version or name not in {shard.name for shard in update.shards}:
            newest = "none" if update is None else update.version
            raise WeightMismatch(f"{name} of version {version} cannot be fetched any more; published is {newest}")
        with open(Path(update.path) / name, "rb") as file:
            file.seek(start)
            return file.read(CHUNK_BYTES)


def is_here(directory: Path) -> bool:
    """Whether this host has the directory."""
    return directory.is_dir()


async def local_model(channel: Channel, directory: Path) -> Path:
    """The directory itself if it is on this host, else a copy of its small files."""
    if is_here(directory):
        return directory
    files: dict[str, bytes] = await channel.call(_FILES, str(directory), timeout_seconds=FETCH_SECONDS)
    copy = _made(directory.name)
    for name, content in files.items():
        (copy / Path(name).name).write_bytes(content)
    return copy


async def local_weights(channel: Channel, update: WeightUpdate) -> WeightUpdate:
    """The same weights in a directory of this host."""
    if not update.path or _are_here(update):
        return update
    target = _made(f"weights-{update.version % 2}")
    for shard in update.shards:
        await _fetch(channel, update.version, shard, target / shard.name)
    return replace(update, path=str(target))


def scratch() -> Path | None:
    """The directory that goes away with this process; None = no keeper has started it."""
    directory = os.environ.get(SCRATCH_VARIABLE)
    return None if directory is None else Path(directory)


def _made(name: str) -> Path:
    """A directory in `scratch`."""
    parent = scratch()
    if parent is None:
        raise ArealError(f"a process that fetches files must have a directory for them in {SCRATCH_VARIABLE}")
    (parent / name).mkdir(exist_ok=True)
    return parent / name


def _are_here(update: WeightUpdate) -> bool:
    """By size only: whoever uses them compares their digests."""
    with suppress(OSError):
        return all((Path(update.path) / shard.name).stat().st_size == shard.size_bytes for shard in update.shards)
    return False


async def _fetch(channel: Channel, version: int, shard: WeightShard, path: Path) -> None:
    # In place: the engine has mapped the file of the version before the last, which has the same size.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _reserve(descriptor, shard, path)
        start = 0
        while start < shard.size_bytes:
            piece: bytes = await channel.call(_WEIGHTS, version, shard.name, start, timeout_seconds=FETCH_SECONDS)
            if not piece:
                raise WeightMismatch(
                    f"{shard.name} of version {version} ends after {start} of {shard.size_bytes} bytes"
                )
            await asyncio.to_thread(os.pwrite, descriptor, piece, start)
            start += len(piece)
        os.truncate(descriptor, shard.size_bytes)
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, shard: WeightShard, path: Path) -> None:
    """All its room now: what is written in part would have holes, and the kernel kills whoever reads one in a mapping
    of a full file system (SIGBUS)."""
    try:
        os.posix_fallocate(descriptor, 0, shard.size_bytes)
    except OSError as error:
        raise ArealError(
            f"{path.parent.parent} on {socket.gethostname()} must have room for two versions of the published weights, "
            f"of which {shard.name} has {shard.size_bytes:,} bytes: {error.strerror}; remove what is not needed there, "
            "or make it larger"
        ) from None
