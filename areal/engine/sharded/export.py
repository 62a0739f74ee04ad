"""A sharded model as safetensors files that no single rank has to hold: to publish it, and to save it.

Tensors are gathered one at a time, and each goes to the rank whose file it belongs to. So a rank holds one whole tensor
at a time, and the files of all ranks together are the model.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from areal.api.engine_api import WeightUpdate
from areal.engine.model.device import CPU
from areal.engine.model.published import (
    INDEX_NAME,
    SHARD_BYTES,
    WritableShard,
    as_published,
    cut,
    index_of,
    whole_digest,
)
from areal.engine.sharded.model import ShardedModel


class ModelFiles:
    """Which tensor goes into which file, and which rank writes that."""

    def __init__(self, model: ShardedModel, dtype: torch.dtype | None = None) -> None:
        """`dtype`: what the files hold; None = what the parameters are."""
        self._model = model
        shapes = as_published(model.shapes(), dtype)
        total = sum(tensor.numel() * tensor.element_size() for _, tensor in shapes)
        ranks = dist.get_world_size()
        self.parts = cut(shapes, max(1, min(SHARD_BYTES, math.ceil(total / ranks))))
        self.own = [name for number, name in enumerate(self.parts) if number % ranks == dist.get_rank()]
        self._file_of = {tensor: name for name, part in self.parts.items() for tensor, _ in part}

    @property
    def index(self) -> str | None:
        """The text of the index file; None = a single file needs none."""
        return index_of(self.parts) if len(self.parts) > 1 else None

    def own_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """File, name and value of each tensor of the rank's own files. All ranks must call it, and go to its end."""
        for name, tensor in self._model.named_weights():
            if self._file_of[name] in self.own:
                yield self._file_of[name], name, tensor


class RankWeightWriter:
    """A rank's half of publishing: writes its files of each version into one of two directories, by turns."""

    def __init__(self, model: ShardedModel, directory: Path, source: str, dtype: torch.dtype) -> None:
        """`source`: where other hosts fetch these files; empty = there are none. `dtype`: what they hold."""
        self._files = ModelFiles(model, dtype)
        self._source = source
        self._slots: list[tuple[Path, dict[str, WritableShard]]] = []
        for slot in (directory / "0", directory / "1"):
            slot.mkdir(mode=0o700, exist_ok=True, parents=True)
            shards = {name: WritableShard(slot / name, self._files.parts[name], {}) for name in self._files.own}
            self._slots.append((slot, shards))
            if self._files.index is not None:
                (slot / INDEX_NAME).write_text(self._files.index, encoding="utf-8")

    def write(self, version: int) -> WeightUpdate:
        """The rank's own files of the weights as they are: its part of a version."""
        slot, shards = self._slots[version % 2]
        for file, name, tensor in self._files.own_tensors():
            shards[file].fill(name, tensor)
        sealed = tuple(replace(shard.seal(), source=self._source) for shard in shards.values())
        return WeightUpdate(version, whole_digest(sealed), str(slot), sealed)


def staged_export(model: ShardedModel) -> dict[str, Any]:
    """Copies of the rank's own files, in host memory, by file and name: training may go on while they are written."""
    files = ModelFiles(model)
    staged: dict[str, Any] = {name: {} for name in files.own}
    for file, name, tensor in files.own_tensors():
        staged[file][name] = tensor.to(CPU, copy=True).contiguous()
    if dist.get_rank() == 0 and files.index is not None:
        staged[INDEX_NAME] = files.index
    return staged


def write_export(staged: dict[str, Any], directory: Path) -> None:
    for name, content in staged.items():
        if isinstance(content, str):
            (directory / name).write_text(content, encoding="utf-8")
        else:
            save_file(content, directory / name, metadata={"format": "pt"})
