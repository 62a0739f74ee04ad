"""OpenAI's Chat Completions."""

from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.chat_messages import parse_messages
from areal.proxy.dialects.chat_stream import ChatWriter
from areal.proxy.dialects.chat_wire import choice, envelope, usage
from areal.proxy.dialects.terms import Terms
from areal.proxy.dialects.tools import Tool, choose, function_tool
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.exchange import Call, EventWriter, Reply

CONVERSATION = frozenset(("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"))
SAMPLING = frozenset(("n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed", "logprobs"))
DELIVERY = frozenset(("stream", "stream_options"))
HONOURED = CONVERSATION | SAMPLING | DELIVERY

MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
"""Parameters that are not honoured, and the values by which they ask for nothing."""

STREAM_OPTIONS = frozenset(("include_usage", "include_obfuscation"))
MAX_SEED = 2**63 - 129


def parse(body: dict[str, Any], terms: Terms) -> Call:
    """Raises ApiError 400 naming the parameter."""
    terms.refuse_unsupported(body, HONOURED, MEANINGLESS)
    limit = fields.integer(body, "max_completion_tokens", 1, 2**31)
    call = Call(
        messages=parse_messages(body, terms.album),
        model=fields.text(body, "model", "model") if body.get("model") is not None else "",
        tools=_tools(body) or None,
        parallel_tool_calls=fields.boolean(body, "parallel_tool_calls", True),
        response_format=_response_format(body),
        n=fields.integer(body, "n", 1, terms.max_choices) or 1,
        max_tokens=fields.integer(body, "max_tokens", 1, 2**31) if limit is None else limit,
        temperature=fields.number(body, "temperature", 0, 2),
        top_p=fields.top_p(body),
        stop=fields.texts(body, "stop"),
        seed=fields.integer(body, "seed", -MAX_SEED, MAX_SEED),
        logprobs=fields.boolean(body, "logprobs", False),
        stream=fields.boolean(body, "stream", False),
    )
    _choose_tool(call, body, terms)
    _stream_options(call, body)
    return call


def render(call: Call, reply: Reply) -> dict[str, Any]:
    """Every field that some client depends on, whether or not it says anything."""
    choices = [choice(reply, number) for number in range(len(reply.choices))]
    return {**envelope(reply, "chat.completion"), "choices": choices, "usage": usage(reply)}


def writer(call: Call) -> EventWriter:
    return ChatWriter(call)


def error(failure: ApiError) -> dict[str, Any]:
    body = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
    return {"error": body}


def _tools(body: dict[str, Any]) -> list[Tool]:
    tools = []
    for place, tool in enumerate(fields.objects(body, "tools", "tools")):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad_request(f"tools[{place}] must be of type function, got {tool.get('type')!r}", "tools")
        tools.append(function_tool(function, "parameters", f"tools[{place}].function"))
    return tools


def _choose_tool(call: Call, body: dict[str, Any], terms: Terms) -> None:
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none", "required"):
        choose(call, choice or "auto")
    elif isinstance(choice, dict) and choice.get("type") == "function":
        choose(call, "named", fields.mapping(choice, "function", "tool_choice.function").get("name"))
    else:
        terms.refuse("tool_choice", choice, "must be auto, none, required or a function")


def _response_format(body: dict[str, Any]) -> dict[str, Any] | None:
    wanted = fields.mapping(body, "response_format", "response_format")
    kind = wanted.get("type", "text")
    if kind == "json_schema":
        described = fields.mapping(wanted, "json_schema", "response_format.json_schema")
        schema = fields.mapping(described, "schema", "response_format.json_schema.schema")
        strict = fields.boolean(described, "strict", False)
        return {"type": "json_schema", "schema": schema, "strict": strict}
    if kind not in ("text", "json_object"):
        raise bad_request(
            f"response_format.type must be text, json_object or json_schema, got {kind!r}", "response_format"
        )
    return {"type": "json_object"} if kind == "json_object" else None


def _stream_options(call: Call, body: dict[str, Any]) -> None:
    options = fields.mapping(body, "stream_options", "stream_options")
    if options and not call.stream:
        raise bad_request(f"stream_options needs stream=true, got {options!r:.200}", "stream_options")
    if unknown := set(options) - STREAM_OPTIONS:
        known = ", ".join(sorted(STREAM_OPTIONS))
        raise bad_request(f"stream_options may have {known}, got {unknown}", "stream_options")
    call.stream_usage = fields.boolean(options, "include_usage", False)
    if call.stream and call.n > 1:
        raise bad_request(f"n must be 1 where stream is true, got {call.n}; ask for several answers without it", "n")
