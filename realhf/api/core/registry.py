"""The names that agents and environments are called by in a config, and how one is made from its name."""

import inspect
from typing import Any

from areal.api.errors import WorkflowError
from areal.rollout.naming import name_of


class Registry:
    """Classes by name. A name has one class for good; defining that class anew, as a notebook does, replaces it."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._classes: dict[str, type[Any]] = {}

    def register(self, name: str, cls: type[Any]) -> None:
        if not inspect.isclass(cls):
            raise WorkflowError(f"an {self._noun} is registered by its class, got {cls!r} as {name!r}")
        known = self._classes.get(name)
        if known is not None and name_of(known) != name_of(cls):
            raise WorkflowError(
                f"the {self._noun} name {name!r} belongs to {name_of(known)} and cannot be given to {name_of(cls)}; "
                "register it under another name"
            )
        self._classes[name] = cls

    def find(self, name: str) -> type[Any]:
        if name not in self._classes:
            raise WorkflowError(
                f"no {self._noun} is registered as {name!r}, there are {', '.join(sorted(self._classes)) or 'none'}; "
                f"call register_{self._noun}({name!r}, YourClass) before the training starts"
            )
        return self._classes[name]


AGENTS = Registry("agent")
ENVIRONMENTS = Registry("environment")


def make(cls: type[Any], args: dict[str, Any], offered: dict[str, Any]) -> Any:
    """`cls(**args)`, completed with what is `offered` under names that its constructor has."""
    return cls(**complete(cls, args, offered))


def complete(cls: type[Any], args: dict[str, Any], offered: dict[str, Any]) -> dict[str, Any]:
    """The arguments that `make` constructs with; refuses what it could not construct."""
    if inspect.isabstract(cls):
        raise WorkflowError(f"{name_of(cls)} must define {', '.join(sorted(cls.__abstractmethods__))}")
    signature = inspect.signature(cls)
    arguments = {name: value for name, value in offered.items() if name in signature.parameters} | args
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise WorkflowError(
            f"{name_of(cls)} cannot be constructed: {error}; its arguments are the `args` of its abstraction"
        ) from None
    return arguments
