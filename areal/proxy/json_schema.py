"""A client's JSON schema made ready to constrain an answer: it allows the same values or fewer, never more.

What models would write without end, or what cannot be sent on, is excluded: numbers that no float can hold, runs of
white space, and properties that a schema allows only because it does not mention them.
"""

import json
from typing import Any
from urllib.parse import unquote

from areal.proxy.errors import bad_request
from areal.utils.shorten import shown

MAX_NUMBER = 10**18
WHITESPACE = r" |\n[ \t]{0,32}"
"""Between two pieces of JSON: one blank, or a line break and an indentation."""

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("additionalProperties", "items", "contains", "propertyNames", "additionalItems")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OPENERS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf", "$ref", "if")
"""With one of these an object may have properties that `properties` does not list."""


def require_schema(schema: dict[str, Any], param: str) -> None:
    """Raises ApiError 400 if a keyword that is read here, at any depth, has a value of the wrong kind.

    `required` is read where there may be an object: old schemas have `"required": true` next to other types.
    """
    schemas: list[Any] = [schema]
    for part in schemas:
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise bad_request(f"a schema in {param} must be an object or a boolean, got {shown(part)}", param)
        types = part.get("type", "object")
        _require(_is_text(types) or _is_texts(types), "type", "a text or a list of texts", part, param)
        if types == "object" or "object" in types:
            _require(_is_texts(part.get("required", [])), "required", "a list of texts", part, param)
        _require(_is_text(part.get("$ref", "")), "$ref", "a text", part, param)
        _require(isinstance(part.get("enum", []), list), "enum", "a list", part, param)
        for keyword in SCHEMAS_BY_NAME:
            _require(isinstance(part.get(keyword, {}), dict), keyword, "an object", part, param)
            schemas += part.get(keyword, {}).values()
        for keyword in SCHEMA_LISTS:
            _require(isinstance(part.get(keyword, []), list), keyword, "a list", part, param)
            schemas += part.get(keyword, [])
        schemas += [part[keyword] for keyword in SCHEMAS if isinstance(part.get(keyword), dict)]
    _require_ends_of_references(schema, [part for part in schemas if isinstance(part, dict)], param)


def _require_ends_of_references(root: dict[str, Any], parts: list[dict[str, Any]], param: str) -> None:
    """Refuse a schema that is defined by itself alone: no value is one, and llguidance can crash over it."""
    ended: set[int] = set()
    for part in parts:
        way: dict[int, Any] = {}
        todo = [(part, False)]
        while todo:
            here, left = todo.pop()
            if left:
                ended.add(id(here))
                del way[id(here)]
            elif id(here) in way:
                raise bad_request(
                    f"a $ref in {param} must lead to a schema other than itself, got {shown(here)}; "
                    "refer to it from a property or from items",
                    param,
                )
            elif id(here) not in ended:
                way[id(here)] = here
                todo += [(here, True), *((each, False) for each in _same_place(root, here))]


def _same_place(root: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas that describe the very value that `schema` describes."""
    found = [each for keyword in SCHEMA_LISTS[:3] for each in schema.get(keyword, [])]
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        target: Any = root
        for name in unquote(reference[1:]).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = target[int(name)] if name.isdecimal() and int(name) < len(target) else None
            else:
                target = target.get(name) if isinstance(target, dict) else None
        found.append(target)
    return [each for each in found if isinstance(each, dict)]


def _require(holds: bool, keyword: str, kind: str, schema: dict[str, Any], param: str) -> None:
    if not holds:
        raise bad_request(f"{keyword} of a schema in {param} must be {kind}, got {shown(schema[keyword])}", param)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def json_rule(schema: dict[str, Any], strict: bool) -> str:
    """The schema as llguidance reads it; one that is not `strict` is followed as far as its keywords are known."""
    closing = '"allOf"' not in json.dumps(schema)  # the parts of an intersection need each other's properties
    narrowed = narrow(schema, closing)
    narrowed["x-guidance"] = {"whitespace_pattern": WHITESPACE, "lenient": not strict}
    return json.dumps(narrowed, ensure_ascii=False)


def narrow(schema: dict[str, Any], closing: bool = True) -> dict[str, Any]:
    """A copy with bounded numbers and, if `closing`, without properties that are not listed."""
    narrowed = {key: _narrow_part(key, value, closing) for key, value in schema.items()}
    if closing and _lists_all_properties(schema):
        narrowed["additionalProperties"] = False
    types = schema.get("type")
    if (types == "number" or (isinstance(types, list) and "number" in types)) and not any(b in schema for b in BOUNDS):
        narrowed |= {"minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}
    return narrowed


def rebase(schema: Any, root: str) -> Any:
    """The schema for use at the place `root` of another one: its references to itself point there."""
    if isinstance(schema, list):
        return [rebase(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: rebase(value, root) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _narrow_part(key: str, value: Any, closing: bool) -> Any:
    if key in SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _narrow_any(part, closing) for name, part in value.items()}
    if key in SCHEMA_LISTS and isinstance(value, list):
        return [_narrow_any(part, closing) for part in value]
    return _narrow_any(value, closing) if key in SCHEMAS else value


def _narrow_any(schema: Any, closing: bool) -> Any:
    return narrow(schema, closing) if isinstance(schema, dict) else schema


def _lists_all_properties(schema: dict[str, Any]) -> bool:
    """It lists its properties, including all that it requires, and says nothing about others."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list) or any(key in schema for key in OPENERS):
        return False
    return schema.get("type", "object") == "object" and all(name in listed for name in required)
