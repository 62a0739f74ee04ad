"""What of a machine decides, to the bit, what training computes.

A run writes it down whenever it is started. Whoever takes its steps again can expect the same bits where these facts
are the same, and only nearly the same numbers elsewhere: sums are added up in another order.
"""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from areal import __version__
from areal.engine.model.device import find_device

DECISIVE = ("cpu", "instructions", "device", "threads", "areal", "torch", "transformers")
"""The facts that decide; the others are for people."""
DECISIVE_IN_SAMPLING = ("kernel",)
"""The facts that decide, besides, what the embedded engine draws (`sampling_kernel`)."""


def machine_facts(device: str, threads: int) -> dict[str, Any]:
    """Of this machine, with a trainer that computes on `device` (as `actor.device`) with so many threads."""
    place = find_device(device, "actor.device")
    return {
        "host": platform.node(),
        "cpu": _cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        "threads": threads,
        "python": platform.python_version(),
        "areal": __version__,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, ...] = DECISIVE) -> list[str]:
    """The decisive facts that are not the same, as `threads: 2, here 1`; those that were not written down are not."""
    known = [name for name in names if name in then]
    return [f"{name}: {then[name]}, here {now.get(name)}" for name in known if then[name] != now.get(name)]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    """None = it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
