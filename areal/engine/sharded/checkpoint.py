"""Checkpoints of a sharded model: written while training goes on, readable at any number of ranks.

The weights are a Hugging Face model in safetensors (export.py), which every rank reads its own part of. The optimizer's
moments are in torch's distributed format, which is read at another world size or mesh than it was written at, and by
one process; those that one process has written are read here too (engine/training/moments.py).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from areal.api.errors import ArealError
from areal.engine.sharded.adapter import AdapterLearner
from areal.engine.sharded.export import staged_export, write_export
from areal.engine.sharded.learner import RankLearner
from areal.engine.training.moments import DIRECTORY, is_of_one_process

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

WRITE_SECONDS = 3600.0
"""How long a checkpoint may take to be written while training goes on."""


class CheckpointWriter:
    """A rank's half of writing checkpoints."""

    def __init__(self) -> None:
        # Messages about files must not come between those of a training step.
        self._group = dist.new_group(backend="gloo")
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: list[Future[Any]] = []

    def begin(self, learner: RankLearner, directory: Path) -> None:
        """Take copies of everything; they are written to `directory`, which exists on every rank's host."""
        self.finish()
        self._writing.clear()
        if not directory.is_dir():
            raise ArealError(
                f"checkpoints are written by every rank, so {str(directory.parent)!r} must be on a file system that "
                "the driver and all ranks share; set output_dir to one"
            )
        if isinstance(learner, AdapterLearner):  # which is small, and every rank has it
            learner.save(directory)
            return
        staged = staged_export(learner.model)
        self._writing.append(self._pool.submit(write_export, staged, directory))
        if dist.get_rank() == 0:
            learner.model.module.config.save_pretrained(directory)
        written: Any = dcp.async_save(
            {"optimizer": _moments(_state(learner))},
            checkpoint_id=directory / DIRECTORY,
            process_group=self._group,
        )
        self._writing.append(written)

    def finish(self) -> None:
        """Wait until all of it is written. May be called in any thread, and more than once."""
        for future in list(self._writing):
            future.result(WRITE_SECONDS)


def load_optimizer(learner: RankLearner, directory: Path) -> None:
    """Take the moments of a checkpoint that any number of ranks, or one process, has written."""
    place = directory / DIRECTORY
    state = _state(learner)
    moments = _moments(state)
    reader = HuggingFaceStorageReader(str(place)) if is_of_one_process(directory) else FileSystemReader(place)
    dcp.load({"optimizer": moments}, storage_reader=reader)
    set_optimizer_state_dict(learner.model.module, learner.optimizer, {**state, **moments}, options=_OPTIONS)


def _moments(state: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer has learnt, without its settings, which are the config's."""
    return {key: value for key, value in state.items() if key.startswith("state.")}


def _state(learner: RankLearner) -> dict[str, Any]:
    state: dict[str, Any] = get_optimizer_state_dict(learner.model.module, learner.optimizer, options=_OPTIONS)
    return state
