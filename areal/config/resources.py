"""What a process needs of its host, as a part of the settings of its role."""

from dataclasses import dataclass

from areal.config.errors import require


@dataclass(kw_only=True)
class Resources:
    gpus: int | None = None
    """GPUs that it has for itself; 0 = it sees none; None = not stated: nothing is set aside, and it sees all."""
    cpus: int = 0
    """CPUs that are set aside for it; 0 = not stated: it shares what there is."""
    memory_gib: float = 0.0
    """Memory that is set aside for it; 0 = not stated."""

    def __post_init__(self) -> None:
        require(self.gpus is None or self.gpus >= 0, f"gpus must be >= 0, got {self.gpus}; use null for any")
        require(self.cpus >= 0, f"cpus must be >= 0, got {self.cpus}; use 0 to state nothing")
        require(self.memory_gib >= 0, f"memory_gib must be >= 0, got {self.memory_gib}; use 0 to state nothing")
