"""From an import string to the object it names, and from an object to the name that messages call it by."""

import difflib
import functools
import importlib
from types import ModuleType
from typing import Any

from areal.api.errors import WorkflowError


def import_object(path: str, what: str) -> Any:
    """The object at `package.module.Name`; the import's own error is kept. `what` is the setting it came from."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute:
        raise WorkflowError(f"{what} must be an import string like my_module.MyAgent, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise WorkflowError(f"{what} {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise WorkflowError(f"{what} {path!r}: module {module_name} has no {attribute}; {_offer(module, attribute)}")
    return getattr(module, attribute)


def name_of(target: Any) -> str:
    """`module.Name` of a class or function, or of an object's class; an import string is its own name."""
    if isinstance(target, str):
        return target
    while isinstance(target, functools.partial):
        target = target.func
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{named.__qualname__}"


def _offer(module: ModuleType, wanted: str) -> str:
    """What the module has to offer instead, the most similar name first."""
    public = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    if not public:
        return "it defines no class or function"
    near = difflib.get_close_matches(wanted, public, n=1)
    return f"it has {', '.join(dict.fromkeys([*near, *public]))}"
