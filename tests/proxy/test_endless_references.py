"""A schema that is only itself is refused: compiled together with tools, it crashed the process of the engine."""

from typing import Any

import pytest

from areal.proxy.errors import ApiError
from areal.proxy.json_schema import require_schema

ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "type": "object"},
    {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    {"definitions": {"a/b": {"allOf": [{"$ref": "#/definitions/a~1b"}]}}, "$ref": "#/definitions/a~1b"},
    {"properties": {"p": {"$ref": "#/properties/p"}}},
    {"anyOf": [{"$ref": "#/anyOf/0"}]},
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_schema_that_is_only_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="must lead to a schema other than itself"):
        require_schema(schema, "response_format")


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#"}},
        {"$defs": {"a": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/schema"},
    ],
)
def test_schema_that_contains_itself_is_fine(schema: dict[str, Any]) -> None:
    require_schema(schema, "response_format")
