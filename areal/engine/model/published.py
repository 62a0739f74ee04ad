"""Weights on their way from the trainer to the engines: shards in safetensors, by the names that Hugging Face gives.

The trainer writes each version into one of two directories in shared memory, by turns, so that the version before stays
readable. Engines of the same host map the files; those of another have fetched them before (infra/rpc/shipping.py).
Every shard has a digest of its own, and none is used whose bytes have another. What the shards hold is their layout: a
whole model, or an adapter to one (adapter.py).
"""

import hashlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from areal.api.engine_api import WeightLayout, WeightShard, WeightUpdate
from areal.api.errors import ArealError, WeightMismatch

SHARD_BYTES = 128 << 20
"""A shard has at most this many bytes of tensors, unless a single tensor has more: large models are hashed by several
threads at once."""
SMALL_BYTES = 16 << 20
"""Shards that are smaller together are hashed sooner than threads would begin to."""
MIB = 1 << 20
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_model.safetensors"
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

NamedTensors = Iterable[tuple[str, Tensor]]
"""Each parameter of a model once, by its Hugging Face name."""


def shared_memory() -> Path:
    """The directory whose files are memory, or where there is none, that of temporary files."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


class WeightWriter:
    """Writes versions of a model's weights, or of an adapter's."""

    def __init__(
        self,
        directory: Path,
        tensors: NamedTensors,
        *,
        layout: WeightLayout = "model",
        dtype: torch.dtype | None = None,
        metadata: Mapping[str, str] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """`tensors` are the model's own: each `write` reads what they hold then.

        `dtype`: what they are published in; None = as they are. `metadata` goes into the header of every shard, so
        digests cover it; `texts` are files beside the shards, for other readers of the directory. Raises ArealError if
        there is no room.
        """
        own = {name: tensor.detach() for name, tensor in tensors}
        named = as_published(own.items(), dtype)
        parts = cut(named, SHARD_BYTES) if layout == "model" else {ADAPTER_NAME: named}  # PEFT reads one file only
        beside = dict(texts or {})
        if len(parts) > 1:
            beside[INDEX_NAME] = index_of(parts)
        self._layout = layout
        self._slots: list[tuple[Path, list[tuple[WritableShard, list[tuple[str, Tensor]]]]]] = []
        for slot in (directory / "0", directory / "1"):
            slot.mkdir(mode=0o700, exist_ok=True, parents=True)
            shards = [
                (WritableShard(slot / name, part, metadata or {}), [(each, own[each]) for each, _ in part])
                for name, part in parts.items()
            ]
            self._slots.append((slot, shards))
            for name, text in beside.items():
                (slot / name).write_text(text, encoding="utf-8")

    def write(self, version: int) -> WeightUpdate:
        """The weights as they are, as this version; the version before it stays readable."""
        directory, shards = self._slots[version % 2]
        written = tuple(_each(lambda pair: _written(*pair), shards, sum(shard.size_bytes for shard, _ in shards)))
        return WeightUpdate(version, whole_digest(written), str(directory), written, self._layout)


class WeightReader:
    """Maps published weights, and checks them before they are used."""

    def __init__(self) -> None:
        self._maps: dict[Path, _MappedShard] = {}

    def read(self, update: WeightUpdate, wanted: NamedTensors) -> list[tuple[Tensor, Tensor]]:
        """Each of the `wanted` tensors with its new values, in the shared files. Raises WeightMismatch."""
        found, _ = self.open(update)
        pairs = []
        for name, tensor in wanted:
            new = found.pop(name, None)
            if new is None or new.shape != tensor.shape:
                shape = "no such tensor" if new is None else f"the shape {[*new.shape]}"
                raise WeightMismatch(
                    f"the weights of version {update.version} must have {name} with the shape {[*tensor.shape]}, "
                    f"got {shape}; the trainer and the engine have different models"
                )
            pairs.append((tensor.detach(), new))
        if found:
            raise WeightMismatch(f"the weights of version {update.version} have {sorted(found)[0]}, this model has not")
        return pairs

    def open(self, update: WeightUpdate) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Every tensor of an update, in the shared files, and the metadata of these. Raises WeightMismatch."""
        found: dict[str, Tensor] = {}
        metadata: dict[str, str] = {}
        for shard in self._checked_shards(update):
            found |= shard.tensors()
            metadata |= shard.metadata()
        return found, metadata

    def check(self, update: WeightUpdate) -> None:
        """Raises WeightMismatch unless the files hold what was published."""
        self._checked_shards(update)

    def _checked_shards(self, update: WeightUpdate) -> "list[_MappedShard]":
        _require_digest(f"version {update.version}", update, update.digest, whole_digest(update.shards))
        total = sum(shard.size_bytes for shard in update.shards)
        return _each(lambda shard: self._checked(update, shard), update.shards, total)

    def _checked(self, update: WeightUpdate, shard: WeightShard) -> "_MappedShard":
        path = Path(update.path) / shard.name
        if path not in self._maps or self._maps[path].size_bytes != shard.size_bytes:
            try:
                self._maps[path] = _MappedShard(path)
            except (OSError, ValueError) as error:
                raise WeightMismatch(
                    f"the weights of version {update.version} must be a safetensors file {str(path)!r}: {error}"
                ) from None
        mapped = self._maps[path]
        _require_digest(f"{shard.name} of version {update.version}", update, shard.digest, mapped.digest())
        return mapped


def _require_digest(what: str, update: WeightUpdate, published: str, found: str) -> None:
    if found != published:
        raise WeightMismatch(f"{what} in {update.path} must have the digest {published}, got {found}; publish it again")


def digest_of(content: Any) -> str:
    """Of anything with a buffer. SHA-256 is the fastest of the standard library's where processors help with it."""
    return hashlib.sha256(content).hexdigest()[:32]


def whole_digest(shards: Sequence[WeightShard]) -> str:
    """A fingerprint of all shards together, so that tokens can be traced to the weights that produced them."""
    return digest_of("\n".join(f"{shard.name} {shard.digest}" for shard in shards).encode())


def digest_of_tensors(tensors: NamedTensors) -> str:
    """A fingerprint of weights that were not published."""
    state = hashlib.sha256()
    for name, tensor in tensors:
        state.update(name.encode())
        state.update(memoryview(tensor.detach().to("cpu", torch.float32).contiguous().numpy()).cast("B"))
    return state.hexdigest()[:32]


class WritableShard:
    """A file in shared memory, laid out for tensors of these names and shapes."""

    def __init__(self, path: Path, tensors: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str]) -> None:
        header = _header(tensors, metadata)
        self.size_bytes = len(header) + sum(_size(tensor) for _, tensor in tensors)
        self._name = path.name
        with open(path, "w+b") as file:
            _reserve(file, path, self.size_bytes)
            self._map = mmap.mmap(file.fileno(), self.size_bytes)
        self._map[: len(header)] = header
        self._views = _views(self._map)

    def fill(self, name: str, tensor: Tensor) -> None:
        self._views[name].copy_(tensor)

    def seal(self) -> WeightShard:
        """What it holds now, with its digest."""
        return WeightShard(self._name, self.size_bytes, digest_of(self._map))


def as_published(tensors: NamedTensors, dtype: torch.dtype | None) -> list[tuple[str, Tensor]]:
    """Names, shapes and the dtype of what is published, without values. Engines that compute in bfloat16 round weights
    to it anyway, so these may travel in half the bytes."""
    return [(name, torch.empty(each.shape, dtype=dtype or each.dtype, device="meta")) for name, each in tensors]


def _written(shard: WritableShard, tensors: list[tuple[str, Tensor]]) -> WeightShard:
    for name, tensor in tensors:
        shard.fill(name, tensor)
    return shard.seal()


class _MappedShard:
    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:  # torch warns of memory that cannot be written to
            self._map = mmap.mmap(file.fileno(), 0)
        self.size_bytes = len(self._map)

    # Both only to be looked at after the digest: a damaged header can be anything.
    def tensors(self) -> dict[str, Tensor]:
        return _views(self._map)

    def metadata(self) -> dict[str, str]:
        metadata: dict[str, str] = _table(self._map)[0].get("__metadata__", {})
        return metadata

    def digest(self) -> str:
        return digest_of(self._map)


def index_of(parts: Mapping[str, Sequence[tuple[str, Tensor]]]) -> str:
    """The text of the file that says which tensor is in which."""
    table = {tensor: name for name, part in parts.items() for tensor, _ in part}
    return json.dumps({"metadata": {}, "weight_map": table})


def cut(tensors: Sequence[tuple[str, Tensor]], most_bytes: int) -> dict[str, list[tuple[str, Tensor]]]:
    """Tensors by the file that they go to, in order."""
    parts: list[list[tuple[str, Tensor]]] = [[]]
    size = 0
    for name, tensor in tensors:
        if parts[-1] and size + _size(tensor) > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append((name, tensor))
        size += _size(tensor)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def _header(tensors: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, tensor in tensors:
        end = at + _size(tensor)
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # so that the tensors are aligned
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _table(content: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors begin. Raises ValueError if it is none."""
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    if not _LENGTH_BYTES < start <= len(content):
        raise ValueError("its header is damaged")
    return json.loads(content[_LENGTH_BYTES:start]), start


def _views(content: mmap.mmap) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in its own memory."""
    table, start = _table(content)
    views = {}
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        flat = torch.frombuffer(content, dtype=dtype, count=(end - first) // dtype.itemsize, offset=start + first)
        views[name] = flat.view(entry["shape"])
    return views


def _each(function: Any, items: Sequence[Any], total_bytes: int) -> list[Any]:
    if len(items) < 2 or total_bytes < SMALL_BYTES:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(len(items), os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def _size(tensor: Tensor) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _reserve(file: BinaryIO, path: Path, size_bytes: int) -> None:
    """Give the file all its room now: the kernel kills a process that writes into a mapping that has none (SIGBUS)."""
    try:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise ArealError(
            f"the weights that are shared with the engines need {size_bytes / MIB:,.1f} MiB for {path.name}, of each "
            f"of two versions, and {path.parent.parent.parent} has {free / MIB:,.1f} MiB free: {error.strerror}; "
            "remove what is not needed there, or make it larger (in a container: docker run --shm-size)"
        ) from None
