"""Tool calls as Qwen3-Coder writes them: tags for the function and its parameters, values as plain text.

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A value's type is what the tool's schema declares. Text that is not of that type is handed on as text, for the tool to
refuse.
"""

import re
from collections.abc import Sequence
from typing import Any

from areal.trajectory.parsers.base import (
    Block,
    ToolCall,
    Tools,
    ToolSyntax,
    after_mark,
    after_space,
    read_json,
    write_json,
)
from areal.trajectory.parsers.hermes import CALL_BEGIN, CALL_END

FUNCTION = "<function="
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
FUNCTION_END = "</function>"

_NAME = re.compile(r"([^<>\n]+)>")
_LITERALS = {"True": True, "False": False, "None": None}
"""Python's values as templates write them."""

MAX_DEPTH = 8
"""Levels of a schema, and references in it, that are followed to find a parameter's type."""

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class Qwen3Coder(ToolSyntax):
    name = "qwen3_coder"
    marks = (CALL_BEGIN,)
    closers = (CALL_END,)
    call_end = CALL_END

    def may_begin(self, text: str) -> bool:
        return FUNCTION.startswith(text[len(CALL_BEGIN) :].lstrip()[: len(FUNCTION)])

    def read(self, text: str, tools: Tools, ended: bool) -> Block | None:
        at = after_mark(text, len(CALL_BEGIN), FUNCTION)
        named = None if at is None else _name(text, at)
        if named is None:
            return None
        name, at = named
        arguments: dict[str, Any] = {}
        schema = _parameters(name, tools)
        while text.startswith(PARAMETER, at := after_space(text, at)):
            parameter = _parameter(text, at)
            if parameter is None:
                return None
            key, value, at = parameter
            if key in arguments:
                raise ValueError(f"{key} is given twice")
            arguments[key] = _typed(value, _property(schema, key), schema)
        after = after_mark(text, at, FUNCTION_END)
        end = None if after is None else after_mark(text, after, CALL_END)
        return None if end is None else Block([ToolCall(name, arguments)], end)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(map(_render, calls))


def _name(text: str, at: int) -> tuple[str, int] | None:
    found = _NAME.match(text, at)
    if found is not None:
        return found[1], found.end()
    if re.compile(r"[^<>\n]*\Z").match(text, at):
        return None
    raise ValueError("a tag has no name")


def _parameter(text: str, at: int) -> tuple[str, str, int] | None:
    """Name, text, and where the next one may begin; the line breaks around the text belong to the format."""
    named = _name(text, at + len(PARAMETER))
    end = -1 if named is None else text.find(PARAMETER_END, named[1])
    if named is None or end < 0:
        return None
    return named[0], text[named[1] : end].removeprefix("\n").removesuffix("\n"), end + len(PARAMETER_END)


def _parameters(name: str, tools: Tools) -> dict[str, Any]:
    schemas = (tool["function"].get("parameters") for tool in tools if tool["function"].get("name") == name)
    schema = next(schemas, None)
    return schema if isinstance(schema, dict) else {}


def _property(schema: dict[str, Any], key: str) -> Any:
    """A client's schema may be anything, as long as no answer has to follow it."""
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def _typed(text: str, schema: Any, root: dict[str, Any]) -> Any:
    types = declared_types(schema, root)
    if not types or "string" in types:
        return text
    try:
        value = _LITERALS[text] if text in _LITERALS else read_json(text)
    except ValueError:
        return text
    fits = any(type(value) in _TYPES.get(name, ()) for name in types)
    return value if fits else text


def declared_types(schema: Any, root: dict[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty = it names none."""
    return _declared_types(schema, root, MAX_DEPTH, {})


def _declared_types(schema: Any, root: dict[str, Any], depth: int, known: dict[tuple[int, int], set[str]]) -> set[str]:
    """`known` has what was found so far: a schema that refers to itself in many places is read once per level."""
    if not isinstance(schema, dict) or not depth:
        return set()
    place = (id(schema), depth)
    if place not in known:
        known[place] = _own_types(schema, root, depth, known)
    return known[place]


def _own_types(
    schema: dict[str, Any], root: dict[str, Any], depth: int, known: dict[tuple[int, int], set[str]]
) -> set[str]:
    if isinstance(reference := schema.get("$ref"), str):
        return _declared_types(_resolve(reference, root), root, depth - 1, known)
    declared = schema.get("type", [])
    listed = declared if isinstance(declared, list) else [declared]
    types = {name for name in listed if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        kinds = schema.get(key)
        parts = [_declared_types(part, root, depth - 1, known) for part in kinds] if isinstance(kinds, list) else []
        types |= set().union(*parts) if all(parts) else {"string"}
    return types


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    place: Any = root
    for key in reference.removeprefix("#/").split("/"):
        place = place.get(key) if isinstance(place, dict) else None
    return place


def _render(call: ToolCall) -> str:
    lines = [CALL_BEGIN, f"{FUNCTION}{_checked_name(call.name)}>"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else write_json(value)
        if PARAMETER_END in text:
            raise ValueError(f"a value must not hold {PARAMETER_END}, got {text!r}")
        lines += [f"{PARAMETER}{_checked_name(key)}>", text, PARAMETER_END]
    return "\n".join([*lines, FUNCTION_END, CALL_END])


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name + ">"):
        raise ValueError(f"a name in a tag must not hold <, > or line breaks, got {name!r}")
    return name
