"""Helpers that know nothing of reinforcement learning, except for `data`, which pads what workflows return."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.utils import logging, stats_tracker

__all__ = ["logging", "stats_tracker"]


def __getattr__(name: str) -> Any:
    # On first use, because every worker process imports this package and most of them need neither module.
    if name not in __all__:
        raise AttributeError(f"module 'areal.utils' has no attribute {name!r}")
    return import_module(f"areal.utils.{name}")
