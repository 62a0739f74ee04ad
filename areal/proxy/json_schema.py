"""A client's JSON schema made ready to constrain an answer: it allows the same values or fewer, never more.

What models would write without end, or what cannot be sent on, is excluded: numbers that no float can hold, runs of
white space, and properties that a schema allows only because it does not mention them.
"""

import json
from typing import Any

MAX_NUMBER = 10**18
WHITESPACE = r" |\n[ \t]{0,32}"
"""Between two pieces of JSON: one blank, or a line break and an indentation."""

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("additionalProperties", "items", "contains", "propertyNames", "additionalItems")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OPENERS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf", "$ref", "if")
"""With one of these an object may have properties that `properties` does not list."""


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
