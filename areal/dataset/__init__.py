"""Tasks: built-in ones made on the spot, and the user's own."""

from areal.dataset.sources import TaskSource, get_custom_dataset, read_tasks

__all__ = ["TaskSource", "get_custom_dataset", "read_tasks"]
