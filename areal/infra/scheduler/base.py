"""A command that a scheduler can place."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Command:
    name: str
    """What people call the process: `rollout worker 0`."""
    argv: list[str]
    log_path: Path
    """Takes what the process prints, both streams, appended."""
    env: dict[str, str] = field(default_factory=dict)
    """Beside the environment of the process that places it."""
