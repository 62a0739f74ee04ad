"""Anthropic's Messages."""

from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.messages_input import parse_messages, parse_system
from areal.proxy.dialects.messages_stream import MessageWriter
from areal.proxy.dialects.messages_wire import error, message
from areal.proxy.dialects.terms import Terms
from areal.proxy.dialects.tools import Tool, choose, function_tool
from areal.proxy.errors import bad_request
from areal.proxy.exchange import Call, EventWriter, Reply

__all__ = ["error", "parse", "render", "writer"]

CONVERSATION = frozenset(("model", "messages", "system", "tools", "tool_choice", "output_config"))
SAMPLING = frozenset(("max_tokens", "temperature", "top_p", "top_k", "stop_sequences"))
HONOURED = CONVERSATION | SAMPLING | {"stream"}
HARMLESS = frozenset(("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"))
"""Where and how fast the hosted service computes; no answer depends on it."""

MEANINGLESS: dict[str, tuple[Any, ...]] = {"thinking": ({"type": "disabled"},), "mcp_servers": ([],)}
"""Parameters that are not honoured, and the values by which they ask for nothing."""

CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def parse(body: dict[str, Any], terms: Terms) -> Call:
    """Raises ApiError 400 naming the parameter."""
    terms.refuse_unsupported(body, HONOURED | HARMLESS, MEANINGLESS)
    limit = fields.integer(body, "max_tokens", 1, 2**31)
    if limit is None:
        raise bad_request("max_tokens must be given: how many tokens the answer may have, got none", "max_tokens")
    call = Call(
        messages=[*parse_system(body), *parse_messages(body, terms.album)],
        id_prefix="msg_",
        model=fields.text(body, "model", "model") if body.get("model") is not None else "",
        tools=_tools(body, terms) or None,
        response_format=_format(body, terms),
        format_param="output_config",
        max_tokens=limit,
        temperature=fields.number(body, "temperature", 0, 1),
        top_p=fields.top_p(body),
        top_k=fields.integer(body, "top_k", 0, 2**31),
        stop=fields.texts(body, "stop_sequences"),
        stream=fields.boolean(body, "stream", False),
    )
    _choose_tool(call, fields.mapping(body, "tool_choice", "tool_choice"))
    return call


def render(call: Call, reply: Reply) -> dict[str, Any]:
    return message(call, reply)


def writer(call: Call) -> EventWriter:
    return MessageWriter(call)


def _tools(body: dict[str, Any], terms: Terms) -> list[Tool]:
    tools = []
    for place, tool in enumerate(fields.objects(body, "tools", "tools")):
        if tool.get("type") not in (None, "custom"):
            terms.refuse("tools", tool["type"], "must be of the client's own: hosted ones are not served here")
            continue
        tools.append(function_tool(tool, "input_schema", f"tools[{place}]"))
    return tools


def _choose_tool(call: Call, choice: dict[str, Any]) -> None:
    kind = choice.get("type", "auto")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise bad_request(f"tool_choice.type must be one of {', '.join(CHOICES)}, got {kind!r}", "tool_choice")
    choose(call, CHOICES[kind], choice.get("name"))
    call.parallel_tool_calls = not fields.boolean(choice, "disable_parallel_tool_use", False)


def _format(body: dict[str, Any], terms: Terms) -> dict[str, Any] | None:
    wanted = fields.mapping(body, "output_config", "output_config")
    if unknown := {name: value for name, value in wanted.items() if name != "format" and value is not None}:
        terms.refuse("output_config", unknown, "may have a format only")
    form = fields.mapping(wanted, "format", "output_config.format")
    if not form:
        return None
    if form.get("type") != "json_schema":
        raise bad_request(f"output_config.format.type must be json_schema, got {form.get('type')!r}", "output_config")
    schema = fields.mapping(form, "schema", "output_config.format.schema")
    return {"type": "json_schema", "schema": schema, "strict": True}
