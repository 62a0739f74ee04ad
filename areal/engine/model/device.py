"""Where a model is computed: the device that a setting names, and the copies between it and the host.

Batches are made on the host, in numpy. What a device computes with is sent there once (`to_device`), and what the host
needs comes back in one wait (`to_host`); on a CPU both cost nothing. Nothing else copies between them, but for weights
that are read, saved or published.
"""

import os

import torch
from torch import Tensor

from areal.config.errors import require

CPU = torch.device("cpu")


def find_device(name: str, setting: str) -> torch.device:
    """The device that `name` means here; `setting` is who asks. Raises ConfigError if this machine lacks it.

    `auto` is CUDA if there is any, else MPS, else the CPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        built = "torch sees" if torch.backends.cuda.is_built() else "torch was installed without CUDA and sees"
        require(
            (device.index or 0) < count,
            f"{setting} must name a device of this machine, got {name}, and {built} {count} CUDA devices; "
            f"{f'use one below cuda:{count}' if count else 'use cpu, or auto for what there is'}",
        )
        return torch.device("cuda", device.index or 0)
    if device.type == "mps":
        require(
            torch.backends.mps.is_available(),
            f"{setting} must name a device of this machine, got mps, which only Apple computers have; "
            "use cpu, or auto for what there is",
        )
    return device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`: the same one on a CPU. To CUDA it travels through pinned memory, without waiting.

    The host may change its tensor as soon as this returns, unless the device is a CPU.
    """
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one device on the host, with one wait for all of them."""
    device = tensors[0].device
    if device.type == "cpu":
        return tensors
    if device.type == "cuda":
        copies = tuple(tensor.to(CPU, non_blocking=True) for tensor in tensors)  # into pinned memory
        torch.cuda.current_stream(device).synchronize()
        return copies
    return tuple(tensor.to(CPU) for tensor in tensors)


def memory_bytes(device: torch.device) -> int:
    """The memory of a device; of the machine, for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
