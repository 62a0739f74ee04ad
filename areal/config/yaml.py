"""YAML as people expect it in a settings file.

PyYAML follows YAML 1.1, where `off` is false, `2e-4` is text, `010` is eight, `2026-01-01` is a date, and of a key
given twice one silently wins. Here only `true` and `false` are booleans, numbers are decimal, repeated keys refused.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areal.config.errors import ConfigError


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own class attribute, filled below)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key_node.value!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_NUMBER = r"[-+]?(?:[0-9][0-9_]*)"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _NUMBER, list("-+0123456789")),
    (
        "float",
        rf"{_NUMBER}?\.[0-9]+(?:[eE][-+]?[0-9]+)?|{_NUMBER}(?:\.[0-9]*)?[eE][-+]?[0-9]+|{_NUMBER}\.|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    """`010` is ten: YAML 1.1 would read it as eight."""
    return int(node.value.replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


@dataclass(frozen=True)
class Verbatim:
    """The right side of `key=value`: a text field takes it literally, every other reads it as YAML."""

    text: str

    def parsed(self) -> Any:
        try:
            return yaml.load(self.text, _Loader) if self.text else ""
        except yaml.YAMLError:
            return self.text


def read_mapping(path: str) -> dict[str, Any]:
    """The settings in a YAML file; an empty file holds none."""
    try:
        loaded = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold settings as `key: value`, got {type(loaded).__name__}")
    return loaded
