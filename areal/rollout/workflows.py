"""From what a user passes as `workflow=` to an object that can run episodes.

Import strings, classes, instances and functions are all accepted, of agents and of RolloutWorkflows. Classes are
constructed once per process. What cannot be found or called is refused with the reason.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from areal.api.errors import WorkflowError
from areal.rollout.constructor import Fillers, check_arguments, construct
from areal.rollout.naming import import_object, name_of

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
        except Exception as error:  # whatever a user's __reduce__ raises
            raise WorkflowError(
                f"{name_of(self.target)} cannot be sent to a rollout worker: {type(error).__name__}: {error}; pass its "
                "class and make in __init__ what cannot travel"
            ) from error
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> "WorkflowSpec":
        try:
            spec: WorkflowSpec = cloudpickle.loads(packed)
        except Exception as error:  # unpickling imports and runs the user's code
            raise WorkflowError(
                f"the workflow cannot be read in a rollout worker: {type(error).__name__}: {error}"
            ) from error
        return spec


def check(spec: WorkflowSpec) -> None:
    """Refuse early, in the driver, what a worker could not load."""
    target = _resolved(spec)
    if inspect.isclass(target):
        check_arguments(target, spec.kwargs)


def load(spec: WorkflowSpec, fillers: Fillers) -> Any:
    """The object that runs episodes; `is_rollout_workflow` tells which door it has."""
    target = _resolved(spec)
    if not inspect.isclass(target):
        return target
    try:
        return construct(target, spec.kwargs, fillers)
    except WorkflowError:
        raise
    except Exception as error:
        where = _last_place(error)
        raise WorkflowError(
            f"{name_of(target)} could not be constructed: {type(error).__name__}: {error} ({where})"
        ) from error


def is_agent(spec: WorkflowSpec) -> bool:
    """Whether a spec means an agent and no RolloutWorkflow; constructs nothing."""
    return not is_rollout_workflow(_resolved(spec))


def is_rollout_workflow(workflow: Any) -> bool:
    """Whether it is called with the engine: it has `arun_episode`, or is a function that takes `engine` first."""
    if hasattr(workflow, "arun_episode"):
        return True
    return inspect.isfunction(workflow) and next(iter(inspect.signature(workflow).parameters), "") == "engine"


def episode_function(workflow: Any) -> Callable[..., Any]:
    """What is called for an episode of a RolloutWorkflow."""
    function: Callable[..., Any] = getattr(workflow, "arun_episode", workflow)
    return function


def agent_function(agent: Any) -> Callable[..., Any]:
    """What is called for an episode of an agent: its `run`, or the agent itself."""
    function: Callable[..., Any] = getattr(agent, "run", agent)
    return function


def _resolved(spec: WorkflowSpec) -> Any:
    """The class, instance or function that a spec means, if it can run an episode."""
    target = import_object(spec.target, "workflow") if isinstance(spec.target, str) else spec.target
    if not _has_door(target):
        raise WorkflowError(
            f"{name_of(target)} cannot run an episode; an agent has `async def run(self, data, **extra_kwargs)`, "
            "a RolloutWorkflow has `async def arun_episode(self, engine, data)`"
        )
    if spec.kwargs and not inspect.isclass(target):
        raise WorkflowError(
            f"workflow_kwargs are constructor arguments, but {name_of(target)} is no class; pass its class or leave "
            f"out {', '.join(spec.kwargs)}"
        )
    return target


def _has_door(target: Any) -> bool:
    if any(callable(getattr(target, door, None)) for door in ("arun_episode", "run")):
        return True
    if inspect.isclass(target):
        return any("__call__" in vars(base) for base in target.__mro__)
    return callable(target)


def _last_place(error: BaseException) -> str:
    """`file:line` of the innermost frame: the worker's traceback does not travel."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "no traceback"
