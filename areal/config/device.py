"""How a device is named in a config. Whether the machine has it is checked where the model is opened."""

import re

from areal.config.errors import require

_NAMES = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?", re.ASCII)


def require_device_name(field: str, name: str) -> None:
    """Raise ConfigError unless `name` names a device."""
    require(
        isinstance(name, str) and _NAMES.fullmatch(name) is not None,
        f"{field} must be auto, cpu, cuda, cuda:N or mps, got {name!r}; use auto for the fastest there is",
    )
