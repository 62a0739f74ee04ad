"""Tasks: built-in ones made on the spot, and the user's own."""

from areal.dataset.sources import get_custom_dataset, read_tasks

__all__ = ["get_custom_dataset", "read_tasks"]
