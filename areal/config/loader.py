"""Fill a config dataclass from a YAML file and `a.b=c` overrides, refusing what it does not know.

One rule for values: they must already have the field's type (a whole number is accepted where a number is wanted, and
an override for a text field is taken literally, so `trial_name=007` stays `007`). Nothing is converted silently.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

from areal.config.errors import ConfigError
from areal.config.experiment import ExperimentConfig
from areal.config.yaml import Verbatim, read_mapping
from areal.utils import logging

T = TypeVar("T")

KINDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
"""What errors call the types of values."""
RENAMED = {"rollout.openai": "rollout.agent"}
"""Older names of settings, accepted with a warning."""


def load_expr_config(argv: Sequence[str], config_class: type[T]) -> tuple[T, str]:
    """Read `--config FILE` and `a.b=c` overrides from `argv`; return the config and the file's path ("" if none)."""
    path, overrides = _split_arguments(argv)
    values: dict[str, Any] = read_mapping(path) if path else {}
    _rename_old_keys(values)
    for override in overrides:
        dotted, _, text = override.partition("=")
        _set(values, _renamed(dotted), Verbatim(text), override)
    config = build(config_class, values)
    # A subclass that is no dataclass itself may lack fields; the code that needs one says so with the remedy.
    if isinstance(config, ExperimentConfig) and hasattr(config, "actor"):
        config.tokenizer_path = config.tokenizer_path or config.actor.path
    return config, path


def build(config_class: type[T], values: Mapping[str, Any], prefix: str = "", base: T | None = None) -> T:
    """Make a `config_class` from nested plain values, the rest from `base`; `prefix` is the dotted path in errors."""
    hints = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    kwargs = {} if base is None else {name: getattr(base, name) for name in fields}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(_unknown_key(str(key), prefix, config_class))
        if dataclasses.is_dataclass(hints[key]):
            kwargs[key] = _build_section(fields[key], hints[key], kwargs.get(key), value, f"{prefix}{key}")
        else:
            kwargs[key] = _convert(hints[key], value, f"{prefix}{key}")
    try:
        return config_class(**kwargs)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _build_section(field: dataclasses.Field[Any], hint: Any, base: Any, value: Any, dotted: str) -> Any:
    """A section keeps the defaults of its owner: GRPO's n_samples stays 8 if only the temperature is set."""
    if isinstance(value, Verbatim):
        value = value.parsed()
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{dotted} is a section with settings of its own, got {value!r}")
    if base is None and field.default_factory is not dataclasses.MISSING:
        base = field.default_factory()
    return build(hint, value or {}, f"{dotted}.", base)


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain values, which `build` turns back into it."""
    return dataclasses.asdict(config)


def _split_arguments(argv: Sequence[str]) -> tuple[str, list[str]]:
    paths, overrides = [], []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--config":
            if not words:
                raise ConfigError("--config needs a file name; write --config FILE.yaml")
            paths.append(words.pop(0))
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
        elif "=" in word and not word.startswith(("-", "=")):
            overrides.append(word)
        else:
            meant = f"; write --config {word}" if word.endswith((".yaml", ".yml")) else ""
            raise ConfigError(f"an argument must be --config FILE or KEY=VALUE, got {word!r}{meant}")
    if len(paths) > 1:
        raise ConfigError(f"--config may be given once, got {' and '.join(paths)}; put the differences in overrides")
    return "".join(paths), overrides


def _set(values: dict[str, Any], dotted: str, value: Verbatim, override: str) -> None:
    *parents, last = dotted.split(".")
    here = values
    for name in parents:
        below = here.get(name)
        if below is None:
            below = here[name] = {}
        if not isinstance(below, dict):
            raise ConfigError(f"{override!r}: {name} is a value, not a section")
        here = below
    here[last] = value


def _renamed(dotted: str) -> str:
    for old, new in RENAMED.items():
        if dotted == old or dotted.startswith(f"{old}."):
            logging.getLogger("config").warning(f"{old} is an older name of {new}; both work, please use {new}")
            return new + dotted.removeprefix(old)
    return dotted


def _rename_old_keys(values: dict[str, Any]) -> None:
    for old in RENAMED:
        section, old_key = old.split(".")
        inner = values.get(section)
        if not isinstance(inner, dict) or old_key not in inner:
            continue
        new = _renamed(old)
        new_key = new.split(".")[1]
        if new_key in inner:
            raise ConfigError(f"{old} and {new} are two names of one section; keep {new}")
        inner[new_key] = inner.pop(old_key)


def _unknown_key(key: str, prefix: str, config_class: type[Any]) -> str:
    here = [field.name for field in dataclasses.fields(config_class)]
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.6)
    if near:
        return f"unknown setting {prefix}{key}; did you mean {prefix}{near[0]}?"
    deeper = [name for name in _dotted_names(config_class) if name.rpartition(".")[2] == key]
    if deeper:
        return f"unknown setting {prefix}{key}; did you mean {' or '.join(prefix + name for name in deeper)}?"
    return f"unknown setting {prefix}{key}; known here: {', '.join(sorted(here))}"


def _dotted_names(config_class: type[Any]) -> Iterator[str]:
    for name, hint in typing.get_type_hints(config_class).items():
        yield name
        if dataclasses.is_dataclass(hint):
            yield from (f"{name}.{inner}" for inner in _dotted_names(typing.cast(type[Any], hint)))


def _convert(hint: Any, value: Any, dotted: str) -> Any:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return _convert_optional(hint, value, dotted)
    if isinstance(value, Verbatim):
        value = value.text if _is_text(hint) else value.parsed()
    if typing.get_origin(hint) is Literal:
        return _convert_choice(typing.get_args(hint), value, dotted)
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        if not isinstance(value, list):
            raise ConfigError(f"{dotted} must be a list, got {value!r}")
        return [_convert(item, each, f"{dotted}[{i}]") for i, each in enumerate(value)]
    return _convert_scalar(hint, value, dotted)


def _is_text(hint: Any) -> bool:
    return hint is str or (typing.get_origin(hint) is Literal and isinstance(typing.get_args(hint)[0], str))


def _convert_optional(hint: Any, value: Any, dotted: str) -> Any:
    """A field may take None or some words besides the values of its one other type."""
    plain = value.parsed() if isinstance(value, Verbatim) else value
    options = typing.get_args(hint)
    words = [word for option in options if typing.get_origin(option) is Literal for word in typing.get_args(option)]
    if plain in words and isinstance(plain, str):
        return plain
    if plain is None and type(None) in options:
        return None
    (other,) = (each for each in options if each is not type(None) and typing.get_origin(each) is not Literal)
    try:
        return _convert(other, value, dotted)
    except ConfigError:
        if not words:
            raise
        kinds = [*words, *(["null"] if type(None) in options else [])]
        raise ConfigError(f"{dotted} must be {', '.join(kinds)} or {KINDS[other]}, got {plain!r}") from None


def _convert_choice(choices: tuple[Any, ...], value: Any, dotted: str) -> Any:
    if value not in choices:
        raise ConfigError(f"{dotted} must be one of {', '.join(map(str, choices))}; got {value!r}")
    return value


def _convert_scalar(hint: Any, value: Any, dotted: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    kind = KINDS[hint]
    if hint is str and isinstance(value, (int, float)):
        raise ConfigError(f"{dotted} must be text, got {value!r}; put it in quotes")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{dotted} must be {kind}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{dotted} must be {kind}, got {value!r}")
    return value
