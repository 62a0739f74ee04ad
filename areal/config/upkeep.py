"""What happens beside the training steps: evaluation, checkpoints, recovery, placement."""

from dataclasses import dataclass
from typing import Literal

from areal.config.errors import require


@dataclass
class EvaluatorConfig:
    freq_steps: int | None = None
    """Evaluate on valid_dataset every this many steps, and before the first and after the last; None = only those."""
    greedy: bool = True
    """Also measure greedy success, before the first and after the last step."""

    def __post_init__(self) -> None:
        require(self.freq_steps is None or self.freq_steps >= 1, f"freq_steps must be >= 1, got {self.freq_steps}")


@dataclass
class SaverConfig:
    freq_steps: int | None = 50
    """Write a checkpoint every this many steps, beside after the last and on Ctrl-C; None = only those."""
    keep: int = 2
    """Checkpoints kept; older ones are removed after a newer one is complete."""

    def __post_init__(self) -> None:
        require(self.freq_steps is None or self.freq_steps >= 1, f"freq_steps must be >= 1, got {self.freq_steps}")
        require(self.keep >= 1, f"keep must be >= 1, got {self.keep}")


@dataclass
class RecoverConfig:
    mode: Literal["auto", "off"] = "auto"
    """An unfinished run of the same name is resumed (auto) or refused (off). A finished one is always refused."""


@dataclass
class SchedulerConfig:
    type: Literal["local"] = "local"
    """Who places the processes: local = this machine."""
    threads: int | None = None
    """Threads that the engine and the trainer compute with, each; None = shared out from the machine's cores."""

    def __post_init__(self) -> None:
        require(self.threads is None or self.threads >= 1, f"threads must be >= 1, got {self.threads}")
