"""Tools as OpenAI's dialects offer and choose them: functions, custom tools, and the subset that may be called.

Both dialects say the same; Chat Completions nests what it says under a key named after the type, Responses does not. A
custom tool is called with a text. Models call tools with objects, so it is offered to them as a function whose one
argument is that text.
"""

from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.base import ParameterRules, Tool, choose_tool, function_tool
from areal.proxy.errors import bad_request
from areal.proxy.types import Call
from areal.trajectory.message import arguments_text
from areal.utils.shorten import shortened, shown

INPUT = "input"
"""The argument of a custom tool."""
CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def read_tools(call: Call, body: dict[str, Any], rules: ParameterRules, *, nested: bool) -> None:
    """`tools` and `tool_choice`; `nested` = as Chat Completions writes them. Raises ApiError 400."""
    if body.get("tools") is None and body.get("tool_choice") in (None, "auto", "none"):
        return
    tools, custom = [], set()
    for place, tool in enumerate(fields.objects(body, "tools", "tools")):
        kind, where = tool.get("type"), f"tools[{place}]"
        if kind not in ("function", "custom"):
            _refuse_kind(kind, where, rules, nested)
            continue
        described, where = _inner(tool, kind, where, nested)
        if kind == "function":
            tools.append(function_tool(described, "parameters", where))
            continue
        tools.append(_custom_tool(described, where, rules))
        custom.add(tools[-1]["function"]["name"])
    call.tools, call.custom_tools = tools or None, frozenset(custom)
    _choose(call, body.get("tool_choice"), rules, nested)


def _refuse_kind(kind: Any, where: str, rules: ParameterRules, nested: bool) -> None:
    if nested:
        raise bad_request(f"{where} must be of type function or custom, got {shown(kind)}", "tools")
    rules.refuse_or_drop("tools", kind, "must be of type function or custom: nothing else is served here")


def _inner(value: dict[str, Any], kind: str, where: str, nested: bool) -> tuple[dict[str, Any], str]:
    """Where the fields of a tool, or of a choice, are."""
    if not nested:
        return value, where
    inner = value.get(kind)
    if not isinstance(inner, dict):
        raise bad_request(f"{where}.{kind} must be an object, got {shown(inner)}", where.partition("[")[0])
    return inner, f"{where}.{kind}"


def _custom_tool(wire: dict[str, Any], where: str, rules: ParameterRules) -> Tool:
    wanted = fields.mapping(wire, "format", f"{where}.format").get("type", "text")
    if wanted != "text":
        rules.refuse_or_drop("tools", wanted, "may have custom ones whose format is text")
    tool = function_tool({**wire, "strict": None}, "", where)
    tool["function"]["parameters"] = CUSTOM_SCHEMA
    return tool


def _choose(call: Call, choice: Any, rules: ParameterRules, nested: bool) -> None:
    if choice in (None, "auto", "none", "required"):
        choose_tool(call, choice or "auto")
        return
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        choose_tool(call, "named", _inner(choice, kind, "tool_choice", nested)[0].get("name"))
    elif kind == "allowed_tools":
        _allow(call, _inner(choice, kind, "tool_choice", nested)[0], nested)
    else:
        rules.refuse_or_drop(
            "tool_choice", choice, "must be auto, none, required, a function, a custom tool or allowed_tools"
        )


def _allow(call: Call, choice: dict[str, Any], nested: bool) -> None:
    """Only the tools that it names are offered; none else can be called."""
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        raise bad_request(f"tool_choice.mode must be auto or required, got {shown(mode)}", "tool_choice")
    offered = {tool["function"]["name"]: tool for tool in call.tools or ()}
    allowed = set()
    for place, tool in enumerate(fields.objects(choice, "tools", "tool_choice.tools")):
        where = f"tool_choice.tools[{place}]"
        inner, where = _inner(tool, str(tool.get("type")), where, nested)
        name = fields.text(inner, "name", f"{where}.name")
        if name not in offered:
            raise bad_request(
                f"{where}.name must be one of the tools, {shortened(', '.join(offered), 100)}, got {shown(name)}",
                "tool_choice",
            )
        allowed.add(name)
    call.tools = [tool for name, tool in offered.items() if name in allowed] or None
    choose_tool(call, mode)


def read_functions(call: Call, body: dict[str, Any]) -> None:
    """`functions` and `function_call`, which came before tools. Raises ApiError 400."""
    functions = fields.objects(body, "functions", "functions")
    call.legacy_functions, call.parallel_tool_calls = True, False
    call.tools = [function_tool(each, "parameters", f"functions[{place}]") for place, each in enumerate(functions)]
    choice = body.get("function_call")
    if choice in (None, "auto", "none"):
        choose_tool(call, choice or "auto")
    elif isinstance(choice, dict):
        choose_tool(call, "named", choice.get("name"))
    else:
        raise bad_request(f"function_call must be auto, none or a name, got {shown(choice)}", "function_call")


def input_of(arguments: Any) -> str:
    """The text with which a custom tool is called; a call that has more than that is given as it is."""
    if isinstance(arguments, dict) and arguments.keys() == {INPUT} and isinstance(arguments[INPUT], str):
        return str(arguments[INPUT])
    return arguments_text(arguments)
