"""A checkpoint is a directory with a Hugging Face model, its tokenizer and the trainer's state. It is never partial."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from areal.api.errors import ArealError
from areal.engine.training.engine import TrainingEngine

STATE_FILE = "trainer.pt"


def save_checkpoint(directory: Path, engine: TrainingEngine, tokenizer: Any, state: dict[str, Any]) -> None:
    """Write next to the target, then rename: a killed run leaves no partial checkpoint under that name."""
    if directory.exists():
        return
    temporary = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write(temporary, engine, tokenizer, state)
        os.rename(temporary, directory)
        _sync(directory.parent)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch and safetensors raise their own on a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        reason = str(error).split("\n")[0]
        raise ArealError(
            f"the checkpoint {directory} cannot be written: {reason}; the older ones are intact"
        ) from error


def load_checkpoint(directory: Path, engine: TrainingEngine) -> dict[str, Any]:
    """Restore the engine; returns the trainer's state."""
    engine.model.load(directory)
    saved = torch.load(directory / STATE_FILE, weights_only=True)
    engine.load_state(saved["engine"])
    state: dict[str, Any] = saved["trainer"]
    return state


def _write(directory: Path, engine: TrainingEngine, tokenizer: Any, state: dict[str, Any]) -> None:
    engine.save(str(directory))
    tokenizer.save_pretrained(directory)
    torch.save({"engine": engine.state(), "trainer": state}, directory / STATE_FILE)
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _sync(path: Path) -> None:
    """Make sure that a file's bytes, or a directory's names, are on the disk before the next step."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
