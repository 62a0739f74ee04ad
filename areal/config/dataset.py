"""Where tasks come from."""

from dataclasses import dataclass

from areal.config.errors import require


@dataclass
class DatasetConfig:
    path: str = ""
    """`builtin:NAME`, a .jsonl or .parquet file with a task per row, or a directory of them or from `save_to_disk`."""
    split: str = ""
    """Of a built-in task or of a directory; empty = train for train_dataset, test for valid_dataset."""
    size: int | None = None
    """Use this many tasks only; None = all."""
    batch_size: int = 32
    """Tasks per training step (each runs gconfig.n_samples episodes)."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be >= 1, got {self.batch_size}")
        require(self.size is None or self.size >= 1, f"size must be >= 1, got {self.size}; leave it out for all")
