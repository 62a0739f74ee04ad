"""Tools and the choice among them. However a client spells a tool, the template sees one spelling of it."""

from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.errors import bad_request
from areal.proxy.exchange import Call

Tool = dict[str, Any]


def function_tool(wire: dict[str, Any], schema_key: str, where: str) -> Tool:
    """As Chat Completions nests it; `wire` has the function's fields, its schema under `schema_key`."""
    function: dict[str, Any] = {"name": fields.text(wire, "name", f"{where}.name")}
    if wire.get("description") is not None:
        function["description"] = fields.text(wire, "description", f"{where}.description")
    if wire.get(schema_key) is not None:
        function["parameters"] = fields.mapping(wire, schema_key, f"{where}.{schema_key}")
    if wire.get("strict") is not None:
        function["strict"] = fields.boolean(wire, "strict", False)
    return {"type": "function", "function": function}


def choose(call: Call, kind: str, name: str | None = None) -> None:
    """Write a choice of kind auto, none, required or named into the call."""
    if kind == "none":
        call.tools = None
    elif kind in ("required", "named"):
        names = [tool["function"]["name"] for tool in call.tools or ()]
        if not names:
            raise bad_request("tool_choice asks for a tool call, but there are no tools; add some", "tool_choice")
        if kind == "named" and name not in names:
            raise bad_request(
                f"tool_choice must name one of the tools, {', '.join(names)}, got {name!r}", "tool_choice"
            )
        call.tool_choice, call.forced_tool = "required", name
