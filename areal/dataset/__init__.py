"""Tasks: built-in ones, generated on demand, and the user's own."""

from areal.dataset.sources import TaskSource, get_custom_dataset, read_tasks

__all__ = ["TaskSource", "get_custom_dataset", "read_tasks"]
