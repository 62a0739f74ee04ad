"""Tasks of a verifiers taskset: `verifiers:ID`, its settings as in `?difficulty=2`.

The id is the name of an installed package, or of a module on the import path, that exports a `Taskset`. A task carries
all of its data, and what environment it belongs to: `areal.workflow.VerifiersWorkflow` needs nothing else. A hash of
its data decides which split it belongs to, as with built-in tasks, and one that was there already is left out.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl

import yaml

from areal.api.errors import DatasetError
from areal.dataset.builtin import SPLITS, Problem, split_of
from areal.utils.installing import missing

PREFIX = "verifiers:"
MOST_REPEATS = 10_000
"""Tasks in a row that were all there already, after which a taskset without end has no others."""


def verifiers_tasks(path: str, split: str, size: int | None) -> list[dict[str, Any]]:
    """The first `size` tasks of a split; None = all."""
    if split not in SPLITS:
        raise DatasetError(f"a verifiers taskset has no split {split!r}; there are {', '.join(SPLITS)}")
    library = verifiers_library(path)
    name, _, query = path.removeprefix(PREFIX).partition("?")
    settings = _settings(path, query)
    taskset = _taskset(library, path, name, settings)
    if size is None and not taskset.bounded:
        raise DatasetError(f"{path} has tasks without end; say how many with train_dataset.size, valid_dataset.size")
    tasks = [
        _as_task(task, {"taskset": {"id": name, **settings}}) for task in islice(_of_split(path, taskset, split), size)
    ]
    if size is not None and len(tasks) < size:
        raise DatasetError(f"{path} has {len(tasks)} different {split} tasks, asked for {size}; ask for fewer")
    return tasks


def verifiers_library(what: str) -> Any:
    try:
        return import_module("verifiers.v1")
    except ImportError as error:
        raise DatasetError(missing(f"{what} needs the verifiers library", error, "verifiers")) from error


def _taskset(library: Any, path: str, name: str, settings: dict[str, Any]) -> Any:
    try:
        config = library.taskset_config_type(name).model_validate({"id": name, **settings})
        return library.load_taskset(config)
    except Exception as error:  # a taskset is anyone's module
        raise DatasetError(f"verifiers cannot load {path}: {_line(error)}") from error


def _of_split(path: str, taskset: Any, split: str) -> Iterator[Any]:
    seen = set()
    repeats = 0
    for task in _loaded(path, taskset):
        data = task.data.model_dump(mode="json", exclude={"idx"})
        key = json.dumps(data, sort_keys=True)
        repeats = repeats + 1 if key in seen else 0
        if repeats == MOST_REPEATS:
            return
        if not repeats and split_of(Problem(key, "")) == split:
            yield task
        seen.add(key)


def _loaded(path: str, taskset: Any) -> Iterator[Any]:
    try:
        yield from taskset
    except Exception as error:
        raise DatasetError(f"verifiers cannot load the tasks of {path}: {_line(error)}") from error


def _as_task(task: Any, environment: dict[str, Any]) -> dict[str, Any]:
    data = task.data.model_dump(mode="json")
    prompt = data.get("prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    if data.get("system_prompt"):
        messages = [{"role": "system", "content": data["system_prompt"]}, *messages]
    return {"messages": messages, "environment": environment, "task": data}


def _settings(path: str, query: str) -> dict[str, Any]:
    """Values are read as in YAML: numbers, true and false, [lists]."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        return {key: yaml.safe_load(value) for key, value in pairs}
    except (ValueError, yaml.YAMLError) as error:
        raise DatasetError(
            f"settings must read as in {PREFIX}ID?key=value&key=value, got {path!r}: {_line(error)}"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
