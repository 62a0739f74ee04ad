"""Messages as Chat Completions writes them, made plain: what the trajectory calls a `Message`."""

# MERGED-DOC
# The parts of a Chat Completions answer that a whole one and a streamed one share.
# A streamed Chat Completions answer: the role, what is said, why it ended, and the usage if it was asked for.
# OpenAI's Chat Completions.

from typing import Any

from areal.proxy.dialects import base as sse
from areal.proxy.dialects import fields
from areal.proxy.dialects.base import ParameterRules, Parts, Tool, chat_picture, choose, function_tool
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.types import Call, CallMade, EventWriter, Reply
from areal.trajectory.completion import Completion
from areal.trajectory.message import Album, Content, Message, arguments_text, parse_arguments

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""`developer` is a newer name for `system`, which is the one that chat templates know."""

PARTS = Parts({"text": "text", "refusal": "refusal"}, "image_url", chat_picture)

SHOWN_PICTURES = ("user", "tool")


def parse_messages(body: dict[str, Any], album: Album | None) -> list[Message]:
    messages = fields.objects(body, "messages", "messages")
    if not messages:
        raise bad_request("messages must hold at least one message, got none", "messages")
    return [_message(message, f"messages[{place}]", album) for place, message in enumerate(messages)]


def _message(wire: dict[str, Any], where: str, album: Album | None) -> Message:
    role = wire.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{where}.role")
    message: Message = {"role": ROLES[role], "content": _content(wire, where, album)}
    if calls := fields.objects(wire, "tool_calls", f"{where}.tool_calls"):
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    if wire.get("function_call") is not None:
        raise bad_request(f"{where}.function_call is not supported; use tool_calls", f"{where}.function_call")
    for name in ("tool_call_id", "name", "reasoning_content"):
        if wire.get(name) is not None:
            message[name] = fields.text(wire, name, f"{where}.{name}")
    return message


def _content(wire: dict[str, Any], where: str, album: Album | None) -> Content:
    content = wire.get("content")
    if content is None and wire["role"] in ("assistant", "tool"):
        return ""
    if wire["role"] not in SHOWN_PICTURES:
        return fields.content(content, PARTS.texts, f"{where}.content")
    return PARTS.content(content, f"{where}.content", album)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function must be an object, got {function!r}", where)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str | dict):
        raise bad_request(f"{where}.function.arguments must be text, got {arguments!r:.200}", where)
    name = fields.text(function, "name", f"{where}.function.name")
    named = call.get("id")
    return {
        "id": named if isinstance(named, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": parse_arguments(arguments)},
    }


def _envelope(reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": None,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def _choice(reply: Reply, number: int) -> dict[str, Any]:
    completion = reply.choices[number]
    return {
        "index": number,
        "message": _written_message(completion.message),
        "logprobs": _logprobs(reply, number),
        "finish_reason": _finish_reason(completion),
    }


def _finish_reason(completion: Completion) -> str:
    if completion.truncated:
        return "length"
    return "tool_calls" if completion.message.get("tool_calls") else "stop"


def _logprobs(reply: Reply, number: int) -> dict[str, Any] | None:
    """Of what the client sees: the end token is no part of it."""
    if not reply.tokens:
        return None
    completion, texts = reply.choices[number], reply.tokens[number]
    seen = len(texts) - (completion.end_id is not None)
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts[:seen], completion.logprobs.tolist()[:seen], strict=True)
    ]
    return {"content": content, "refusal": None}


def _written_message(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": "assistant", "content": message["content"], "refusal": None}
    if reasoning := message.get("reasoning_content"):
        wire["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        wire["content"] = message["content"] or None
        wire["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_text(call["function"]["arguments"])}}
            for call in calls
        ]
    return wire


class ChatWriter:
    def __init__(self, call: Call) -> None:
        self._usage: dict[str, Any] = {"usage": None} if call.stream_usage else {}
        self._envelope: dict[str, Any] = {}

    def begin(self, reply: Reply) -> bytes:
        self._envelope = _envelope(reply, "chat.completion.chunk")
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def text(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def reasoning(self, text: str) -> bytes:
        return self._chunk({"reasoning_content": text})

    def call(self, call: CallMade) -> bytes:
        """The name first, then the arguments, as the hosted service does."""
        function = {"name": call.name, "arguments": ""}
        head = {"index": call.number, "id": call.id, "type": "function", "function": function}
        tail = {"index": call.number, "function": {"arguments": call.arguments}}
        return self._chunk({"tool_calls": [head]}) + self._chunk({"tool_calls": [tail]})

    def end(self, reply: Reply) -> bytes:
        (completion,) = reply.choices
        last = self._chunk({}, _finish_reason(completion), _logprobs(reply, 0))
        if self._usage:
            last += sse.data({**self._envelope, "choices": [], "usage": _usage(reply)})
        return last + sse.DONE

    def failure(self, failure: ApiError) -> bytes:
        body = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
        return sse.data({"error": body})

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse.data({**self._envelope, "choices": [choice], **self._usage})


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


def parse(body: dict[str, Any], terms: ParameterRules) -> Call:
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
    choices = [_choice(reply, number) for number in range(len(reply.choices))]
    return {**_envelope(reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}


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


def _choose_tool(call: Call, body: dict[str, Any], terms: ParameterRules) -> None:
    _choice = body.get("tool_choice")
    if _choice in (None, "auto", "none", "required"):
        choose(call, _choice or "auto")
    elif isinstance(_choice, dict) and _choice.get("type") == "function":
        choose(call, "named", fields.mapping(_choice, "function", "tool_choice.function").get("name"))
    else:
        terms.refuse("tool_choice", _choice, "must be auto, none, required or a function")


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
