"""From what a user passes as `workflow=` to an object that can run episodes.

Import strings, classes, instances and functions are all accepted, of agents and of RolloutWorkflows. A class is
constructed once per process, with the user's arguments completed from the config. What cannot be found, constructed or
called is refused with the reason.
"""

import difflib
import importlib
import inspect
import io
import json
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, BinaryIO

import cloudpickle

from areal.api.errors import WorkflowError
from areal.config.rollout import GenerationHyperparameters
from areal.utils.callables import name_of
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer

Workflow = Any
"""An import string, a class, an instance or a function."""

REWARD_MODEL = "model:"
"""How a `reward_fn` begins that names the directory of a reward model in place of a function."""
FILLED = ("gconfig", "tokenizer", "processor", "reward_fn")
"""Arguments that a user may leave to the config; an empty string leaves one too."""


@dataclass(frozen=True)
class WorkflowSpec:
    """A workflow on its way to a worker."""

    target: Workflow
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Of its constructor."""

    def pack(self, *, by_value: bool = False, reward_fn: str = "") -> bytes:
        """Bytes that a worker with the same import path can unpack; objects of `__main__` travel by value.

        `by_value`: so do functions and classes of the user's own modules, which other hosts may not have, and among
        them the config's `reward_fn`, if the workflow takes it. Installed packages never do.
        """
        spec = self._of_objects(reward_fn) if by_value else self
        try:
            packed = _dumps_by_value(spec) if by_value else cloudpickle.dumps(spec)
        except Exception as error:  # whatever a user's __reduce__ raises
            raise WorkflowError(
                f"{name_of(self.target)} cannot be sent to a rollout worker: {type(error).__name__}: {error}; pass its "
                "class and make in __init__ what cannot travel"
            ) from error
        return packed

    def described(self) -> dict[str, Any]:
        """In plain values, for those who want to make it again: its `name`, import string (`workflow`) and `kwargs`.

        None = there is no import string, or the arguments are not plain.
        """
        name = name_of(self.target)
        importable = isinstance(self.target, str) or (
            isinstance(self.target, type | FunctionType) and "<locals>" not in name and not name.startswith("__main__.")
        )
        try:
            plain = json.loads(json.dumps(self.kwargs)) == self.kwargs
        except (TypeError, ValueError):
            plain = False
        return {"name": name, "workflow": name if importable else None, "kwargs": self.kwargs if plain else None}

    @classmethod
    def unpack(cls, packed: bytes) -> "WorkflowSpec":
        try:
            spec: WorkflowSpec = cloudpickle.loads(packed)
        except Exception as error:  # unpickling imports and runs the user's code
            remedy = "; install it on that host, or set PYTHONPATH" if isinstance(error, ImportError) else ""
            raise WorkflowError(
                f"the workflow cannot be read in a rollout worker: {type(error).__name__}: {error}{remedy}"
            ) from error
        return spec

    def _of_objects(self, reward_fn: str) -> "WorkflowSpec":
        """The same, with objects in place of the import strings that name something of the user's own."""
        target = import_object(self.target, "workflow") if isinstance(self.target, str) else self.target
        kwargs = _given(self.kwargs)
        if reward_fn and inspect.isclass(target) and "reward_fn" in _named_parameters(target):
            kwargs = {"reward_fn": reward_fn} | kwargs
        named = kwargs.get("reward_fn")
        if isinstance(named, str) and not named.startswith(REWARD_MODEL):
            function = import_object(named, "reward_fn")
            kwargs["reward_fn"] = function if _own_module(named.rpartition(".")[0]) else named
        own = isinstance(self.target, str) and _own_module(self.target.rpartition(".")[0])
        return replace(self, target=target if own else self.target, kwargs=kwargs)


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends functions and classes of the user's own modules by value, wherever it meets them."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.travelling: list[ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        module = _own_module(obj.__module__ or "") if isinstance(obj, type | FunctionType) else None
        if module is not None and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self.travelling.append(module)
        return super().reducer_override(obj)


def _dumps_by_value(value: Any) -> bytes:
    file = io.BytesIO()
    pickler = _ByValuePickler(file)
    try:
        pickler.dump(value)
    finally:
        for module in pickler.travelling:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _own_module(name: str) -> ModuleType | None:
    """The module of that name, if it is the user's own: a source file that was not installed."""
    module = sys.modules.get(name)
    file = Path(getattr(module, "__file__", None) or "")
    if module is None or file.suffix != ".py" or name.partition(".")[0] in ("__main__", "areal", "realhf"):
        return None
    standard = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")]
    installed = {"site-packages", "dist-packages"}.intersection(file.parts)
    return None if installed or any(file.is_relative_to(path) for path in standard) else module


@dataclass(frozen=True)
class Fillers:
    """What the arguments in `FILLED` are, where the user leaves them to the config."""

    gconfig: GenerationHyperparameters
    tokenizer: Any
    """One, or the path of one."""
    reward_fn: str = ""
    """An import string; empty = none."""
    processor: Any = None
    """Of a vision model; None = the model takes no images."""


def check(spec: WorkflowSpec, reward_fn: str = "") -> None:
    """Refuse early, in the driver, what a worker could not load; `reward_fn` as in `Fillers`."""
    target = _resolved(spec)
    if inspect.isclass(target):
        check_arguments(target, spec.kwargs, reward_fn)


def unused_reward(spec: WorkflowSpec, reward_fn: str) -> str:
    """A sentence for a config's `reward_fn` that the workflow is not given; empty if it is, or there is none."""
    target = _resolved(spec)
    if not reward_fn or (inspect.isclass(target) and "reward_fn" in _named_parameters(target)):
        return ""
    return (
        f"reward_fn={reward_fn} is not used: {name_of(target)} takes no reward_fn, and what its episodes return is "
        "their reward; leave it out, or name it in the constructor"
    )


def load(spec: WorkflowSpec, fillers: Fillers) -> Any:
    """The object that runs episodes, an agent or a RolloutWorkflow."""
    target = _resolved(spec)
    if not inspect.isclass(target):
        return target
    try:
        return construct(target, spec.kwargs, fillers)
    except WorkflowError:
        raise
    except Exception as error:
        raise WorkflowError(
            f"{name_of(target)} could not be constructed: {type(error).__name__}: {error} ({_innermost_line(error)})"
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
    """What is called for an episode of a RolloutWorkflow: its `arun_episode`.

    Or its `arun_row`, where the class that has the one has the other: it gives the same without tensors. A subclass
    that says anew what an episode is does so in `arun_episode`.
    """
    if "arun_episode" not in getattr(workflow, "__dict__", {}):
        owner = next((cls for cls in type(workflow).__mro__ if "arun_episode" in vars(cls)), None)
        if owner is not None and "arun_row" in vars(owner):
            return workflow.arun_row  # type: ignore[no-any-return]
    function: Callable[..., Any] = getattr(workflow, "arun_episode", workflow)
    return function


def agent_function(agent: Any) -> Callable[..., Any]:
    """What is called for an episode of an agent: its `run`, or the agent itself."""
    function: Callable[..., Any] = getattr(agent, "run", agent)
    return function


def _resolved(spec: WorkflowSpec) -> Any:
    """The class, instance or function that a spec means, if it can run an episode."""
    target = import_object(spec.target, "workflow") if isinstance(spec.target, str) else spec.target
    if not _can_run_episodes(target):
        raise WorkflowError(
            f"{name_of(target)} cannot run an episode; an agent has `async def run(self, data, **extra_kwargs)`, "
            "a RolloutWorkflow has `async def arun_episode(self, engine, data)`"
        )
    if spec.kwargs and not inspect.isclass(target):
        raise WorkflowError(
            f"workflow_kwargs are constructor arguments, but {name_of(target)} is not a class; pass its class or "
            f"leave out {', '.join(spec.kwargs)}"
        )
    return target


def _can_run_episodes(target: Any) -> bool:
    if any(callable(getattr(target, method, None)) for method in ("arun_episode", "run")):
        return True
    if inspect.isclass(target):
        return any("__call__" in vars(base) for base in target.__mro__)
    return callable(target)


def _innermost_line(error: BaseException) -> str:
    """`file:line` where it was raised: the worker's traceback does not travel."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "no traceback"


def construct(target: type, kwargs: dict[str, Any], fillers: Fillers) -> Any:
    """`target(**kwargs)`, with what its constructor names and they lack filled in, and import strings resolved."""
    offered = {"gconfig": fillers.gconfig, "tokenizer": fillers.tokenizer}
    if fillers.processor is not None:
        offered["processor"] = fillers.processor
    if fillers.reward_fn:
        offered["reward_fn"] = fillers.reward_fn
    names = _named_parameters(target)
    arguments = {name: value for name, value in offered.items() if name in names} | _given(kwargs)
    _require_complete(target, arguments)
    if isinstance(arguments.get("tokenizer"), str):
        arguments["tokenizer"] = load_hf_tokenizer(arguments["tokenizer"])
    if isinstance(arguments.get("processor"), str):
        arguments["processor"] = load_hf_processor(arguments["processor"])
    if isinstance(arguments.get("reward_fn"), str):
        arguments["reward_fn"] = _reward_function(arguments["reward_fn"])
    return target(**arguments)


def check_arguments(target: type, kwargs: dict[str, Any], reward_fn: str = "") -> None:
    """Refuse now what the config does not complete."""
    if inspect.isabstract(target):
        missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
        raise WorkflowError(f"{name_of(target)} cannot be constructed: it does not define {missing}")
    given, names = _given(kwargs), _named_parameters(target)
    filled = names & set(FILLED) - (set() if reward_fn else {"reward_fn"})
    _require_complete(target, dict.fromkeys(filled) | given)
    named = given.get("reward_fn", reward_fn if "reward_fn" in names else "")
    if isinstance(named, str) and named and not named.startswith(REWARD_MODEL):
        import_object(named, "reward_fn")


def _reward_function(named: str) -> Any:
    """What the name of a reward function stands for."""
    if not named.startswith(REWARD_MODEL):
        return import_object(named, "reward_fn")
    from areal.engine.reward_model import RewardModel  # it loads torch, which few workers need

    return RewardModel(named.removeprefix(REWARD_MODEL))


def _given(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if not (name in FILLED and value == "")}


def _named_parameters(target: type) -> set[str]:
    """Keywords that the constructor names, or hands on by `**kwargs` to a base class that names them."""
    names = set(inspect.signature(target).parameters)
    for base in target.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        names |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
    return names


def _require_complete(target: type, arguments: dict[str, Any]) -> None:
    signature = inspect.signature(target)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        parameter = signature.parameters.get("reward_fn")
        lacks_reward_fn = (
            parameter is not None and parameter.default is parameter.empty and "reward_fn" not in arguments
        )
        remedy = ", or set reward_fn in the config" if lacks_reward_fn else ""
        raise WorkflowError(
            f"{name_of(target)} cannot be constructed: {error}; its arguments are given by workflow_kwargs{remedy}"
        ) from None


def import_object(path: str, what: str) -> Any:
    """The object at `package.module.Name`; the import's own error is kept. `what` is the setting it came from."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute:
        raise WorkflowError(f"{what} must be an import string like my_module.MyAgent, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        remedy = ""
        if isinstance(error, ModuleNotFoundError) and error.name == path.partition(".")[0]:
            remedy = f"; start it in the directory that has {error.name}, or add that to PYTHONPATH"
        raise WorkflowError(f"{what} {path!r} cannot be imported: {type(error).__name__}: {error}{remedy}") from error
    if not hasattr(module, attribute):
        choices = _describe_choices(module, attribute)
        raise WorkflowError(f"{what} {path!r}: module {module_name} has no {attribute}; {choices}")
    return getattr(module, attribute)


def _describe_choices(module: ModuleType, wanted: str) -> str:
    """What the module has instead, the most similar name first."""
    public = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    if not public:
        return "it defines no class or function"
    near = difflib.get_close_matches(wanted, public, n=1)
    return f"it has {', '.join(dict.fromkeys([*near, *public]))}"
