"""Every setting as people look it up: name, type, default, unit and meaning, and a JSON schema of a settings file.

Nothing is written twice: types and defaults are those of the dataclasses, and what a setting means is the text below
its field, which is read from the source.
"""

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union

from areal.config.loader import RENAMED

SCHEMA = "http://json-schema.org/draft-07/schema#"
"""The version that editors know best."""
PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text"}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
UNITS = {
    "seconds": "seconds",
    "gib": "GiB",
    "bytes": "bytes",
    "tokens": "tokens",
    "steps": "steps",
    "epochs": "epochs",
    "samples": "episodes",
    "rollouts": "episodes",
    "rejections": "episodes",
    "batch": "tasks",
    "gpus": "GPUs",
    "cpus": "CPUs",
    "threads": "threads",
    "workers": "processes",
}
"""A word in the name of a number -> what it counts; other numbers have no unit."""


@dataclass(frozen=True)
class Setting:
    name: str
    """Dotted: `rollout.agent.mode`."""
    type: str
    """In words."""
    default: Any
    unit: str
    """Empty = it has none."""
    meaning: str
    choices: list[Any]
    """Empty = other values than these are allowed."""


def settings(config_class: type[Any]) -> list[Setting]:
    """All that such a config has, sections before what is below them left out, in the order of the source."""
    return list(_settings(config_class, config_class(), ""))


def _settings(config_class: type[Any], defaults: Any, prefix: str) -> Iterator[Setting]:
    hints, meanings = typing.get_type_hints(config_class), field_texts(config_class)
    for field in dataclasses.fields(config_class):
        hint, default = hints[field.name], getattr(defaults, field.name)
        if dataclasses.is_dataclass(hint):
            yield from _settings(typing.cast(type[Any], hint), default, f"{prefix}{field.name}.")
        else:
            meaning, unit = meanings.get(field.name, ""), _unit(field.name, hint)
            yield Setting(f"{prefix}{field.name}", _in_words(hint), default, unit, meaning, _choices(hint))


def field_texts(config_class: type[Any]) -> dict[str, str]:
    """Field -> the text below it, on one line; of a field that a subclass declares again without one, its base's."""
    texts: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                texts[field.target.id] = " ".join(text.split())
    return texts


def json_schema(config_class: type[Any]) -> dict[str, Any]:
    """Of a file that `--config` takes: names, types, choices, defaults, meanings. Unknown names are errors."""
    return {
        "$schema": SCHEMA,
        "title": f"settings of areal ({config_class.__name__})",
        **_section_schema(config_class, config_class(), ""),
    }


def _section_schema(config_class: type[Any], defaults: Any, prefix: str) -> dict[str, Any]:
    hints, meanings = typing.get_type_hints(config_class), field_texts(config_class)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        hint, default, dotted = hints[field.name], getattr(defaults, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            below = _section_schema(typing.cast(type[Any], hint), default, f"{dotted}.")
        else:
            below = {**_value_schema(hint), "default": default}
        properties[field.name] = {"description": meanings.get(field.name, ""), **below}
    for old, new in RENAMED.items():
        section, _, name = new.rpartition(".")
        if f"{section}." == prefix:
            older = {"deprecated": True, "description": f"an older name of {new}"}
            properties[old.rpartition(".")[2]] = {**properties[name], **older}
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def _value_schema(hint: Any) -> dict[str, Any]:
    options = _options(hint)
    if typing.get_origin(hint) is list:
        return {"type": "array", "items": _value_schema(typing.get_args(hint)[0])}
    if len(options) > 1:
        kinds = [_value_schema(each) for each in options]
        if all(set(each) == {"type"} for each in kinds):
            return {"type": [each["type"] for each in kinds]}
        return {"anyOf": kinds}
    if hint is type(None):
        return {"type": "null"}
    if choices := _choices(hint):
        return {"enum": choices}
    return {"type": JSON_TYPES[hint]}


def _options(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> list[Any]:
    return list(typing.get_args(hint)) if typing.get_origin(hint) is Literal else []


def _in_words(hint: Any) -> str:
    words = []
    for option in _options(hint):
        if option is type(None):
            words.append("null")
        elif typing.get_origin(option) is list:
            words.append(f"list of {_in_words(typing.get_args(option)[0])}s")
        else:
            words += [as_yaml(each) for each in _choices(option)] or [PLAIN[option]]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def as_yaml(value: Any) -> str:
    """As one would write it in a file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else '""'


def _unit(name: str, hint: Any) -> str:
    if not {int, float}.intersection(_options(hint)) or any(map(_choices, _options(hint))):
        return ""
    return next((UNITS[word] for word in name.split("_") if word in UNITS), "")
