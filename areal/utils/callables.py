"""Facts about a user's function: the name that messages use for it, and whether it must be awaited."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def name_of(target: Any) -> str:
    """`module.Name` of a class or function, or of an object's class; an import string is its own name."""
    if isinstance(target, str):
        return target
    target = _unwrapped(target)
    named = target if hasattr(target, "__qualname__") else type(target)
    module = getattr(named, "__module__", None)
    return f"{module}.{named.__qualname__}" if module else str(named.__qualname__)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an async function, or an object whose `__call__` is one."""
    function = _unwrapped(function)
    # The type's, because calling a class makes an object, whatever `__call__` it defines for its objects.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _unwrapped(target: Any) -> Any:
    while isinstance(target, partial):
        target = target.func
    return target
