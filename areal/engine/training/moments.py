"""What AdamW keeps of every parameter, in a checkpoint: the directory `optimizer/`, by the parameters' own names.

One process writes a safetensors file there, ranks write torch's distributed format (engine/sharded/checkpoint.py).
Both kinds are read by one process and by any number of ranks, each of which reads no more than its own part.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal.api.errors import ModelError

KINDS = ("exp_avg", "exp_avg_sq")
"""Running means of the gradient and of its square."""
DIRECTORY = "optimizer"
_FILE = "moments.safetensors"
_PREFIX = "optimizer."
"""What torch's distributed format puts before the keys of a state dict that was saved under this name."""


@dataclass(frozen=True)
class Moments:
    steps: int
    """That the optimizer has taken."""
    named: Mapping[str, Mapping[str, Tensor]]
    """By kind and by parameter."""


def is_of_one_process(directory: Path) -> bool:
    """Whether one process has written the moments of a checkpoint."""
    return (directory / DIRECTORY / _FILE).exists()


def save_moments(directory: Path, moments: Moments) -> None:
    place = directory / DIRECTORY
    place.mkdir(exist_ok=True)
    steps = torch.tensor(float(moments.steps))
    tensors = {_PREFIX + key: tensor.contiguous() for key, tensor in _keys(moments).items()}
    tensors |= {f"{_PREFIX}state.{name}.step": steps.clone() for name in moments.named[KINDS[0]]}
    save_file(tensors, place / _FILE, metadata={"format": "pt"})


def load_moments(directory: Path, moments: Moments) -> Moments:
    """The moments of a checkpoint, in the tensors of `moments`."""
    if is_of_one_process(directory):
        return _read_file(directory / DIRECTORY / _FILE, moments)
    return _read_distributed(directory / DIRECTORY, moments)


def _read_file(path: Path, moments: Moments) -> Moments:
    try:
        with safe_open(path, framework="pt") as file:
            for key, tensor in _keys(moments).items():
                tensor.copy_(file.get_tensor(_PREFIX + key))
            return Moments(int(file.get_tensor(_PREFIX + _step_key(moments))), moments.named)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the optimizer's moments in {str(path)!r}: {error}") from None


def _read_distributed(place: Path, moments: Moments) -> Moments:
    import torch.distributed.checkpoint as dcp  # takes a second to load

    state: dict[str, Any] = {**_keys(moments), _step_key(moments): torch.tensor(0.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs in one process, which `no_dist` says
        dcp.load({_PREFIX.rstrip("."): state}, checkpoint_id=place, no_dist=True)
    return Moments(int(state[_step_key(moments)]), moments.named)


def _keys(moments: Moments) -> dict[str, Tensor]:
    return {f"state.{name}.{kind}": each for kind in KINDS for name, each in moments.named[kind].items()}


def _step_key(moments: Moments) -> str:
    """All parameters have taken equally many steps; that of any one."""
    return f"state.{next(iter(moments.named[KINDS[0]]))}.step"
