"""From what a user passes as `workflow=` to an object that can run episodes.

Import strings, classes, instances and functions are all accepted, of agents and of RolloutWorkflows. Classes are
constructed once per process. What cannot be found or called is refused with the reason.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from areal.api.errors import WorkflowError
from areal.config.generation import GenerationHyperparameters

Workflow = Any
"""An import string, a class, an instance or a function."""


@dataclass(frozen=True)
class WorkflowSpec:
    """A workflow on its way to a worker."""

    target: Workflow
    kwargs: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Bytes that a worker with the same import path can unpack; objects of `__main__` travel by value."""
        try:
            packed: bytes = cloudpickle.dumps(self)
        except Exception as error:
            raise WorkflowError(f"{name_of(self.target)} cannot be sent to a rollout worker: {error}") from error
        return packed


@dataclass(frozen=True)
class Fillers:
    """Constructor arguments that a workflow may leave to the config."""

    gconfig: GenerationHyperparameters
    tokenizer: Any
    reward_fn: str = ""


def check(spec: WorkflowSpec) -> None:
    """Refuse early, in the driver, what a worker could not load."""
    target = _imported(spec.target) if isinstance(spec.target, str) else spec.target
    _entry(target)


def load(spec: WorkflowSpec, fillers: Fillers) -> Any:
    """The object that runs episodes; `is_rollout_workflow` tells which door it has."""
    target = _imported(spec.target) if isinstance(spec.target, str) else spec.target
    _entry(target)
    if not inspect.isclass(target):
        if spec.kwargs:
            raise WorkflowError(f"workflow_kwargs are for a class, but {name_of(target)} is already made")
        return target
    return target(**_filled(target, spec.kwargs, fillers))


def is_rollout_workflow(workflow: Any) -> bool:
    return hasattr(workflow, "arun_episode")


def agent_function(agent: Any) -> Callable[..., Any]:
    """What is called for an episode: the agent's `run`, or the agent itself."""
    return agent.run if hasattr(agent, "run") else agent  # type: ignore[no-any-return]


def name_of(target: Workflow) -> str:
    if isinstance(target, str):
        return target
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{named.__qualname__}"


def import_object(path: str, what: str) -> Any:
    """The object at `package.module.Name`; the import's own error is kept."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise WorkflowError(f"{what} must be an import string like my_module.MyAgent, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise WorkflowError(f"{what} {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        names = [name for name, value in vars(module).items() if callable(value) and value.__module__ == module_name]
        raise WorkflowError(f"{what} {path!r}: module {module_name} has no {attribute}; it has {', '.join(names)}")
    return getattr(module, attribute)


def _imported(path: str) -> Any:
    return import_object(path, "workflow")


def _entry(target: Any) -> None:
    """Refuse what has no door."""
    doors = ("arun_episode", "run")
    if any(callable(getattr(target, door, None)) for door in doors):
        return
    is_function = callable(target) and not inspect.isclass(target)
    calls_async = inspect.isclass(target) and "__call__" in vars(target)
    if not is_function and not calls_async:
        raise WorkflowError(
            f"{name_of(target)} cannot run an episode; an agent has `async def run(self, data, **extra_kwargs)`, "
            "a RolloutWorkflow has `async def arun_episode(self, engine, data)`"
        )


def _filled(target: type, kwargs: dict[str, Any], fillers: Fillers) -> dict[str, Any]:
    """`kwargs`, with what the constructor names and they lack taken from the config, and import strings resolved."""
    accepted = inspect.signature(target).parameters
    filled = dict(kwargs)
    if "gconfig" in accepted:
        filled.setdefault("gconfig", fillers.gconfig)
    if "tokenizer" in accepted:
        filled.setdefault("tokenizer", fillers.tokenizer)
    if "reward_fn" in accepted and fillers.reward_fn:
        filled.setdefault("reward_fn", fillers.reward_fn)
    if isinstance(filled.get("tokenizer"), str):
        from areal.utils.hf_utils import load_hf_tokenizer

        filled["tokenizer"] = load_hf_tokenizer(filled["tokenizer"])
    if isinstance(filled.get("reward_fn"), str):
        filled["reward_fn"] = import_object(filled["reward_fn"], "reward_fn")
    try:
        inspect.signature(target).bind(**filled)
    except TypeError as error:
        raise WorkflowError(
            f"{name_of(target)} cannot be constructed: {error}; pass it in workflow_kwargs"
            + (" or set reward_fn in the config" if "reward_fn" in str(error) else "")
        ) from None
    return filled
