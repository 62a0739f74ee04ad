"""What a process on another host fetches from the driver: the small files of a model, and pieces of published weights.

So nothing needs a shared file system. A process first looks whether a path is there: on the driver's own host, or where
file systems are shared, nothing travels. What it fetches goes to a directory that its keeper removes. How an engine
puts the pieces together: `host_weights.py`.
"""

import asyncio
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ArealError, ModelError, WeightMismatch
from areal.infra.rpc.channel import Channel, Handler

SCRATCH_VARIABLE = "AREAL_SCRATCH"
"""Names the directory of a process that its keeper made and removes."""
SHARED_VARIABLE = "AREAL_SHARED"
"""Names the one that processes of the run on this host have together."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Files that do not travel with a model: its weights come when they are published."""
MAX_FILES_BYTES = 128 << 20
FILES_SECONDS = 120.0
PIECE_BYTES = 1 << 20
"""Weights travel in such pieces: one keeps the driver's event loop for a millisecond or two, and fits caches."""
PIECE_SECONDS = 60.0
"""How long one may take to arrive."""
READ_WEIGHTS = "read_weights"
_FILES = "model_files"


class Shipper:
    """The driver's end."""

    def __init__(self, directories: Iterable[Path]) -> None:
        """`directories`: the models and tokenizers that may be asked for."""
        self._directories = {str(directory): directory for directory in directories}
        self.published: WeightUpdate | None = None

    @property
    def handlers(self) -> dict[str, Handler]:
        return {_FILES: self._files, READ_WEIGHTS: self._read}

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

    async def _read(self, version: int, name: str, start: int, have: str) -> bytes | None:
        """A piece of a shard of the weights that were published last; None if its digest is `have`."""
        path = self._path_of(version, name)
        piece = await asyncio.to_thread(_piece, path, start, have)
        self._path_of(version, name)  # otherwise its file may have been written again meanwhile
        return piece

    def _path_of(self, version: int, name: str) -> Path:
        update = self.published
        if update is None or update.version != version or name not in {shard.name for shard in update.shards}:
            newest = "none" if update is None else update.version
            raise WeightMismatch(f"{name} of version {version} cannot be fetched any more; published is {newest}")
        return Path(update.path) / name


def _piece(path: Path, start: int, have: str) -> bytes | None:
    with open(path, "rb", buffering=0) as file:
        piece = os.pread(file.fileno(), PIECE_BYTES, start)
    return None if have and digest_of_piece(piece) == have else piece


def digest_of_piece(piece: bytes) -> str:
    return hashlib.sha256(piece).hexdigest()


def is_here(directory: Path) -> bool:
    """Whether this host has the directory."""
    return directory.is_dir()


async def local_model(channel: Channel, directory: Path) -> Path:
    """The directory itself if it is on this host, else a copy of its small files."""
    if is_here(directory):
        return directory
    files: dict[str, bytes] = await channel.call(_FILES, str(directory), timeout_seconds=FILES_SECONDS)
    copy = _made(directory.name)
    for name, content in files.items():
        (copy / Path(name).name).write_bytes(content)
    return copy


def scratch() -> Path | None:
    """The directory that goes away with this process; None = no keeper has started it."""
    return _named_by(SCRATCH_VARIABLE)


def shared() -> Path | None:
    """The directory that goes away with the last process of the run on this host; None = no keeper has started it."""
    return _named_by(SHARED_VARIABLE)


def _named_by(variable: str) -> Path | None:
    directory = os.environ.get(variable)
    return None if directory is None else Path(directory)


def _made(name: str) -> Path:
    """A directory in `scratch`."""
    parent = scratch()
    if parent is None:
        raise ArealError(f"a process that fetches files must have a directory for them in {SCRATCH_VARIABLE}")
    (parent / name).mkdir(exist_ok=True)
    return parent / name
