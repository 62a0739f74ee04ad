"""Fill a config dataclass from a YAML file and `a.b=c` overrides, refusing what it does not know.

One rule for values: they must already have the field's type (an int is accepted for a float, and YAML's quirk of
reading `2e-4` as text is mended). Nothing is coerced silently.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from areal.config.errors import ConfigError

T = TypeVar("T")

RENAMED = {"rollout.openai": "rollout.agent"}
"""Older spellings, accepted with a notice."""


def load_expr_config(argv: Sequence[str], config_class: type[T]) -> tuple[T, str]:
    """Read `--config FILE` and `a.b=c` overrides from `argv`; return the config and the file's path ("" without one)."""
    path, overrides = _split_arguments(argv)
    values: dict[str, Any] = _read_yaml(path) if path else {}
    for override in overrides:
        _apply_override(values, override)
    _rename_old_keys(values)
    return build(config_class, values), path


def build(config_class: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Make `config_class` from plain nested values; `prefix` is the dotted path used in errors."""
    hints = typing.get_type_hints(config_class)
    names = [field.name for field in dataclasses.fields(config_class)]  # type: ignore[arg-type]
    kwargs = {}
    for key, value in values.items():
        if key not in names:
            raise ConfigError(_unknown_key(f"{prefix}{key}", str(key), prefix, names))
        kwargs[key] = _convert(hints[key], value, f"{prefix}{key}")
    return config_class(**kwargs)


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain values that `build` takes back."""
    return dataclasses.asdict(config)


def _split_arguments(argv: Sequence[str]) -> tuple[str, list[str]]:
    path, overrides = "", []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--config":
            if not words:
                raise ConfigError("--config needs a file name; write --config FILE.yaml")
            path = words.pop(0)
        elif word.startswith("--config="):
            path = word.removeprefix("--config=")
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
        else:
            raise ConfigError(f"an argument must be --config FILE or KEY=VALUE, got {word!r}")
    return path, overrides


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path!r}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold settings as `key: value`, got {type(loaded).__name__}")
    return loaded


def _apply_override(values: dict[str, Any], override: str) -> None:
    dotted, _, text = override.partition("=")
    *parents, last = dotted.split(".")
    here = values
    for name in parents:
        below = here.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{override!r}: {name} is a value, not a section")
        here = below
    try:
        here[last] = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        here[last] = text


def _rename_old_keys(values: dict[str, Any]) -> None:
    from areal.utils import logging

    for old, new in RENAMED.items():
        section, old_key = old.split(".")
        new_key = new.split(".")[1]
        inner = values.get(section)
        if isinstance(inner, dict) and old_key in inner:
            logging.getLogger("config").warning(f"{old} is an older name of {new}; both work, please use {new}")
            inner[new_key] = {**inner.pop(old_key), **inner.get(new_key, {})}


def _unknown_key(dotted: str, key: str, prefix: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(sorted(names))}"
    return f"unknown setting {dotted}; {hint}"


def _convert(hint: Any, value: Any, dotted: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        rest = [option for option in options if option is not type(None)]
        return _convert(rest[0], value, dotted)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{dotted} is a section with settings of its own, got {value!r}")
        return build(typing.cast(type[Any], hint), value, prefix=f"{dotted}.")
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(f"{dotted} must be one of {', '.join(map(str, choices))}; got {value!r}")
        return value
    if origin is list:
        (item,) = typing.get_args(hint)
        if not isinstance(value, list):
            raise ConfigError(f"{dotted} must be a list, got {value!r}")
        return [_convert(item, each, f"{dotted}[{i}]") for i, each in enumerate(value)]
    return _convert_scalar(hint, value, dotted)


def _convert_scalar(hint: Any, value: Any, dotted: str) -> Any:
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(hint, str(hint))
        raise ConfigError(f"{dotted} must be {kind}, got {value!r}")
    return value
