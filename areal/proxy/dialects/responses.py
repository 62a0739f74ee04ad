"""OpenAI's Responses."""

from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.chat import error
from areal.proxy.dialects.responses_input import parse_input
from areal.proxy.dialects.responses_stream import ResponseWriter
from areal.proxy.dialects.responses_wire import output_items, response
from areal.proxy.dialects.terms import Terms
from areal.proxy.dialects.tools import Tool, choose, function_tool
from areal.proxy.errors import bad_request
from areal.proxy.exchange import Call, EventWriter, Reply

__all__ = ["error", "parse", "render", "writer"]

CONVERSATION = frozenset(
    ("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text")
)
SAMPLING = frozenset(("max_output_tokens", "temperature", "top_p"))
HONOURED = CONVERSATION | SAMPLING | {"stream", "include"}

MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Parameters that are not honoured, and the values by which they ask for nothing."""

HARMLESS = frozenset(("reasoning", "stream_options"))
"""`reasoning` sets the effort of hosted models: this one thinks as it was trained to."""

LOGPROBS = "message.output_text.logprobs"
ECHOED = (
    *("instructions", "metadata", "previous_response_id", "reasoning"),
    *("store", "text", "tool_choice", "tools", "user"),
)


def parse(body: dict[str, Any], terms: Terms) -> Call:
    """Raises ApiError 400 naming the parameter."""
    terms.refuse_unsupported(body, HONOURED | HARMLESS, MEANINGLESS)
    if LOGPROBS in (body.get("include") or ()):
        terms.refuse("include", LOGPROBS, "may not ask for log-probabilities: only chat/completions reports them")
    call = Call(
        messages=parse_input(body, terms.album),
        id_prefix="resp_",
        model=fields.text(body, "model", "model") if body.get("model") is not None else "",
        instructions=_text(body, "instructions"),
        continues=_text(body, "previous_response_id"),
        tools=_tools(body, terms) or None,
        parallel_tool_calls=fields.boolean(body, "parallel_tool_calls", True),
        response_format=_format(body),
        format_param="text.format",
        max_tokens=fields.integer(body, "max_output_tokens", 1, 2**31),
        temperature=fields.number(body, "temperature", 0, 2),
        top_p=fields.top_p(body),
        stream=fields.boolean(body, "stream", False),
        echo={name: body[name] for name in ECHOED if body.get(name) is not None},
    )
    _choose_tool(call, body, terms)
    return call


def render(call: Call, reply: Reply) -> dict[str, Any]:
    return response(call, reply, output_items(reply))


def writer(call: Call) -> EventWriter:
    return ResponseWriter(call)


def _text(body: dict[str, Any], name: str) -> str | None:
    return None if body.get(name) is None else fields.text(body, name, name)


def _tools(body: dict[str, Any], terms: Terms) -> list[Tool]:
    tools = []
    for place, tool in enumerate(fields.objects(body, "tools", "tools")):
        if tool.get("type") != "function":
            terms.refuse("tools", tool.get("type"), "must be of type function: nothing else is served here")
            continue
        tools.append(function_tool(tool, "parameters", f"tools[{place}]"))
    return tools


def _choose_tool(call: Call, body: dict[str, Any], terms: Terms) -> None:
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none", "required"):
        choose(call, choice or "auto")
    elif isinstance(choice, dict) and choice.get("type") == "function":
        choose(call, "named", choice.get("name"))
    else:
        terms.refuse("tool_choice", choice, "must be auto, none, required or a function")


def _format(body: dict[str, Any]) -> dict[str, Any] | None:
    """`text.verbosity` is a wish to hosted models; `text.format` is honoured."""
    wanted = fields.mapping(fields.mapping(body, "text", "text"), "format", "text.format")
    kind = wanted.get("type", "text")
    if kind == "json_schema":
        schema = fields.mapping(wanted, "schema", "text.format.schema")
        return {"type": "json_schema", "schema": schema, "strict": fields.boolean(wanted, "strict", False)}
    if kind not in ("text", "json_object"):
        raise bad_request(f"text.format.type must be text, json_object or json_schema, got {kind!r}", "text.format")
    return {"type": "json_object"} if kind == "json_object" else None
