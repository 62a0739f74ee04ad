"""How a device is named in a config, and whether it can be one of the GPUs that are set aside for its process.

Whether the machine has it is checked where the model is opened.
"""

import re

from areal.config.errors import require

_NAMES = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?", re.ASCII)


def require_device_name(field: str, name: str) -> None:
    """Raise ConfigError unless `name` names a device."""
    require(
        isinstance(name, str) and _NAMES.fullmatch(name) is not None,
        f"{field} must be auto, cpu, cuda, cuda:N or mps, got {name!r}; use auto for the fastest there is",
    )


def require_device_among(gpus: int | None, device: str) -> None:
    """Raise ConfigError if a process for which `gpus` GPUs are set aside does not see that one among them."""
    if gpus is None or not device.startswith("cuda"):
        return
    require(gpus > 0, f"device must be one that the process sees, got {device} with gpus=0; use cpu, or gpus=1")
    index = int(device.partition(":")[2] or 0)
    require(
        index < gpus,
        f"device must be one of the GPUs that are set aside, which the process counts from 0, got {device} with "
        f"gpus={gpus}; use cuda for the first of them, or leave gpus out to choose among all of the machine",
    )
