"""The arguments that a workflow's class is constructed with: the user's, completed from the config."""

import inspect
from dataclasses import dataclass
from typing import Any

from areal.api.errors import WorkflowError
from areal.config.generation import GenerationHyperparameters
from areal.rollout.naming import import_object, name_of
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer

FILLED = ("gconfig", "tokenizer", "processor", "reward_fn")
"""Arguments that a user may leave to the config; an empty string leaves one too."""


@dataclass(frozen=True)
class Fillers:
    """What they are filled with."""

    gconfig: GenerationHyperparameters
    tokenizer: Any
    """One, or the path of one."""
    reward_fn: str = ""
    """An import string; empty = none."""
    processor: Any = None
    """Of a model that sees pictures."""


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
        arguments["tokenizer"] = load_hf_tokenizer(_directory(arguments["tokenizer"]))
    if isinstance(arguments.get("processor"), str):
        arguments["processor"] = load_hf_processor(_directory(arguments["processor"]))
    if isinstance(arguments.get("reward_fn"), str):
        arguments["reward_fn"] = import_object(arguments["reward_fn"], "reward_fn")
    return target(**arguments)


def check_arguments(target: type, kwargs: dict[str, Any]) -> None:
    """Refuse now what no config could complete."""
    if inspect.isabstract(target):
        missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
        raise WorkflowError(f"{name_of(target)} cannot be constructed: it does not define {missing}")
    given = _given(kwargs)
    _require_complete(target, dict.fromkeys(_named_parameters(target) & set(FILLED)) | given)
    if isinstance(given.get("reward_fn"), str):
        import_object(given["reward_fn"], "reward_fn")


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
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError as error:
        remedy = ", or set reward_fn in the config" if "reward_fn" in str(error) else ""
        raise WorkflowError(
            f"{name_of(target)} cannot be constructed: {error}; its arguments are given by workflow_kwargs{remedy}"
        ) from None


def _directory(path: str) -> str:
    if path.startswith("builtin:"):
        from areal.engine.models import find_model  # makes models, so it needs torch

        return str(find_model(path))
    return path
