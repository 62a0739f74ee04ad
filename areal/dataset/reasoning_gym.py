"""Problems of the reasoning-gym library: `reasoning-gym:NAME`, the generator's settings as in `?max_terms=3&seed=7`.

A generator has as many numbered problems as its `size` says. A hash of its question decides which split a problem
belongs to, as with built-in tasks, and one that was there already is left out: splits share no problem.
`areal.reward.reasoning_gym_reward` scores an answer with nothing but the task.
"""

import dataclasses
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl

import yaml

from areal.api.errors import DatasetError
from areal.dataset.builtin import SPLITS, Problem, split_of
from areal.utils.installing import missing

PREFIX = "reasoning-gym:"
_SYSTEM_PROMPT = "system_prompt"
"""The one setting that is not a generator's: a name among the library's own system prompts."""


def reasoning_gym_tasks(path: str, split: str, size: int | None) -> list[dict[str, Any]]:
    """The first `size` tasks of a split; None = all."""
    if split not in SPLITS:
        raise DatasetError(f"reasoning-gym has no split {split!r}; there are {', '.join(SPLITS)}")
    library = _library(path)
    name, _, query = path.removeprefix(PREFIX).partition("?")
    settings = _settings(path, query)
    system = _system_messages(library, settings.pop(_SYSTEM_PROMPT, None))
    generator = _generator(library, name, settings)
    entries = _entries_of_split(path, generator, split)
    tasks = [_as_task(entry, system, {"name": name, "settings": settings}) for entry in islice(entries, size)]
    if size is not None and len(tasks) < size:
        raise DatasetError(
            f"{path} has {len(tasks)} different {split} tasks among {len(generator)} problems, asked for {size}; "
            "ask for fewer, or for more problems with the setting size"
        )
    return tasks


def _settings(path: str, query: str) -> dict[str, Any]:
    """Values are read as in YAML: numbers, true and false, [lists]."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        return {"seed": 0, **{key: yaml.safe_load(value) for key, value in pairs}}
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise DatasetError(
            f"settings must read as in {PREFIX}NAME?key=value&key=value, got {path!r}: {problem}"
        ) from None


def _generator(library: Any, name: str, settings: dict[str, Any]) -> Any:
    known = library.factory.DATASETS
    if name not in known:
        raise DatasetError(f"reasoning-gym has no generator {name!r}; there are {', '.join(sorted(known))}")
    fields = [field.name for field in dataclasses.fields(known[name][1])]
    for key in settings:
        if key not in fields:
            raise DatasetError(
                f"{PREFIX}{name} has no setting {key!r}; there are {', '.join([*fields, _SYSTEM_PROMPT])}"
            )
    if type(settings["seed"]) is not int:  # without one every start of a run would have other tasks
        raise DatasetError(f"the setting seed of {PREFIX}{name} must be an integer, got {settings['seed']!r}")
    try:
        return library.create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as error:  # how its generators refuse a setting
        raise DatasetError(f"{PREFIX}{name} refuses its settings {settings}: {error}") from error


def _made(path: str, generator: Any) -> Iterator[dict[str, Any]]:
    try:
        yield from generator
    except Exception as error:  # a setting that its generator finds out about too late
        said = " ".join(str(error).split())[:400] or type(error).__name__
        raise DatasetError(f"reasoning-gym cannot make the problems of {path}: {said}; change the settings") from error


def _entries_of_split(path: str, generator: Any, split: str) -> Iterator[dict[str, Any]]:
    seen = set()
    for entry in _made(path, generator):
        question = entry["question"]
        if question not in seen and split_of(Problem(question, "")) == split:
            seen.add(question)
            yield entry


def _as_task(entry: dict[str, Any], system: list[dict[str, str]], generator: dict[str, Any]) -> dict[str, Any]:
    messages = [*system, {"role": "user", "content": entry["question"]}]
    return {**entry, "messages": messages, "generator": generator}


def _system_messages(library: Any, name: Any) -> list[dict[str, str]]:
    if name is None:
        return []
    prompts = library.utils.SYSTEM_PROMPTS
    if not isinstance(name, str) or name not in prompts:
        raise DatasetError(f"reasoning-gym has no system prompt {name!r}; there are {', '.join(prompts)}")
    return [{"role": "system", "content": prompts[name]}]


def _library(path: str) -> Any:
    try:
        return import_module("reasoning_gym")
    except ImportError as error:
        raise DatasetError(missing(f"{path} needs the reasoning-gym library", error, "reasoning-gym")) from error
