"""What all processes of a run build on: calls between them, schedulers, the episode context, HTTP clients, stalls."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.infra import workflow_context

__all__ = ["workflow_context"]


def __getattr__(name: str) -> Any:
    # On first use, because keepers import parts of this package and must start at once.
    if name not in __all__:
        raise AttributeError(f"module 'areal.infra' has no attribute {name!r}")
    return import_module(f"areal.infra.{name}")
