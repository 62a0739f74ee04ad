"""A checkpoint is a directory that appears whole: a Hugging Face model with its tokenizer, and the trainer's state."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from areal.engine.training import TrainingEngine
from areal.engine.weights import load_weights

STATE_FILE = "trainer.pt"


def save_checkpoint(directory: Path, engine: TrainingEngine, tokenizer: Any, state: dict[str, Any]) -> None:
    """Write beside the target, then rename: a killed run leaves no half checkpoint under that name."""
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    engine.save(str(temporary))
    tokenizer.save_pretrained(temporary)
    torch.save({"engine": engine.state(), "trainer": state}, temporary / STATE_FILE)
    for file in temporary.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    os.rename(temporary, directory)


def load_checkpoint(directory: Path, engine: TrainingEngine) -> dict[str, Any]:
    """Put the engine where it was; return the trainer's state."""
    load_weights(engine.decoder, directory)
    saved = torch.load(directory / STATE_FILE, weights_only=True)
    engine.load_state(saved["engine"])
    state: dict[str, Any] = saved["trainer"]
    return state
