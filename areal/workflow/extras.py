"""Libraries that only some agents need: loaded when such an agent is made, and named with the remedy if missing."""

from importlib import import_module
from typing import Any

from areal.api.errors import WorkflowError


def load(module: str, library: str, *, extra: str) -> Any:
    """The module; `library` is its name for people, `extra` what installs it. Raises WorkflowError."""
    try:
        return import_module(module)
    except ImportError as error:
        raise WorkflowError(f"this agent needs {library} ({error}); pip install areal[{extra}]") from error
