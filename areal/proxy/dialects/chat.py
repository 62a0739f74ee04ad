"""OpenAI's Chat Completions: a request read, and its answer written, whole or as a stream."""

from collections.abc import Sequence
from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.base import (
    MAX_TOKENS,
    SSE_DONE,
    ContentParts,
    Images,
    ParameterRules,
    openai_error,
    openai_format,
    sse_data,
)
from areal.proxy.dialects.openai_tools import INPUT, input_of, read_functions, read_tools
from areal.proxy.dialects.sampling import MAX_TOP_LOGPROBS, STEERING, steering, thinks, token_object
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.types import Call, EventWriter, Reply, SampledToken, ToolCallEvent
from areal.trajectory.message import Content, Message, arguments_text, parse_arguments
from areal.trajectory.tree import Completion
from areal.utils.images import read_data_url
from areal.utils.shorten import shown

__all__ = ["GROWING", "error", "parse", "render", "writer"]

CONVERSATION = frozenset(("model", "messages", "response_format"))
TOOLS = frozenset(("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"))
SAMPLING = frozenset(("n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed", *STEERING))
TOLD = frozenset(("logprobs", "top_logprobs", "reasoning_effort", "stream", "stream_options"))
HONOURED = CONVERSATION | TOOLS | SAMPLING | TOLD

MEANINGLESS: dict[str, tuple[Any, ...]] = {"modalities": (["text"],)}
"""Parameters that are not honoured, and the values by which they ask for nothing."""

STREAM_OPTIONS = frozenset(("include_usage", "include_obfuscation"))
MAX_SEED = 2**63 - 129

ROLES = {
    **{"system": "system", "developer": "system", "user": "user"},
    **{"assistant": "assistant", "tool": "tool", "function": "tool"},
}
"""`developer` and `function` are other names for what chat templates know as `system` and `tool`."""
ROLES_WITH_IMAGES = ("user", "tool")


GROWING = "messages"


def parse(body: dict[str, Any], rules: ParameterRules, past: Sequence[Message] = ()) -> Call:
    """Raises ApiError 400 naming the parameter."""
    rules.refuse_unsupported(body, HONOURED, MEANINGLESS)
    limit = fields.integer(body, "max_completion_tokens", 1, MAX_TOKENS)
    call = Call(
        messages=_messages(body, rules.images, past),
        model=fields.optional_text(body, "model") or "",
        parallel_tool_calls=fields.boolean(body, "parallel_tool_calls", True),
        response_format=openai_format(
            fields.mapping(body, "response_format", "response_format"), "response_format", "json_schema"
        ),
        n=fields.integer(body, "n", 1, rules.max_choices) or 1,
        max_tokens=fields.integer(body, "max_tokens", 1, MAX_TOKENS) if limit is None else limit,
        temperature=fields.number(body, "temperature", 0, 2),
        top_p=fields.top_p(body),
        stop=fields.texts(body, "stop"),
        seed=fields.integer(body, "seed", -MAX_SEED, MAX_SEED),
        logprobs=fields.boolean(body, "logprobs", False),
        top_logprobs=fields.integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0,
        steering=steering(body, rules),
        thinks=thinks(body.get("reasoning_effort"), "reasoning_effort", rules),
        stream=fields.boolean(body, "stream", False),
    )
    if body.get("functions") is None:
        if isinstance(body.get("function_call"), dict):
            raise bad_request("function_call asks for a call, but there are no functions; add some", "function_call")
        read_tools(call, body, rules, nested=True)
    elif body.get("tools") is None:
        read_functions(call, body)
    else:
        raise bad_request("functions and tools exclude each other; use tools", "functions")
    if call.top_logprobs and not call.logprobs:
        raise bad_request(f"top_logprobs needs logprobs=true, got {call.top_logprobs}", "top_logprobs")
    read_stream_options(call, body)
    return call


def _messages(body: dict[str, Any], images: Images, past: Sequence[Message]) -> list[Message]:
    messages = fields.objects(body, GROWING, GROWING)
    if not messages:
        raise bad_request("messages must hold at least one message, got none", GROWING)
    newer = enumerate(messages, len(past))
    return [*past, *(_message(message, place, images) for place, message in newer)]


def _message(wire: dict[str, Any], place: int, images: Images) -> Message:
    role, where = wire.get("role"), f"messages[{place}]"
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{where}.role")
    message: Message = {"role": ROLES[role], "content": _content(wire, where, images)}
    if calls := fields.objects(wire, "tool_calls", f"{where}.tool_calls"):
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    if wire.get("function_call") is not None:
        # A function's result has no id: it answers the message before it.
        message["tool_calls"] = [_function_call(wire["function_call"], f"function_{place}", f"{where}.function_call")]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if wire.get(name) is not None:
            message[name] = fields.text(wire, name, f"{where}.{name}")
    if role == "function":
        message["tool_call_id"] = f"function_{place - 1}"
    return message


def _content(wire: dict[str, Any], where: str, images: Images) -> Content:
    content = wire.get("content")
    if content is None and wire["role"] in ("assistant", "tool"):
        return ""
    if wire["role"] not in ROLES_WITH_IMAGES:
        return PARTS.text(content, f"{where}.content")
    return PARTS.content(content, f"{where}.content", images)


def _image(part: dict[str, Any], where: str) -> bytes:
    """`detail` is a hint for hosted models; here the model's own processor decides on the resolution."""
    return read_data_url(fields.text(fields.mapping(part, "image_url", where), "url", f"{where}.image_url.url"))


PARTS = ContentParts({"text": "text", "refusal": "refusal"}, "image_url", _image)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    call_id = call.get("id")
    call_id = call_id if isinstance(call_id, str) else ""
    if call.get("type") != "custom":
        return _function_call(call.get("function"), call_id, f"{where}.function")
    custom = fields.mapping(call, "custom", f"{where}.custom")
    function = {
        "name": fields.text(custom, "name", f"{where}.custom.name"),
        "arguments": {INPUT: fields.text(custom, "input", f"{where}.custom.input")},
    }
    return {"id": call_id, "type": "function", "function": function}


def _function_call(function: Any, call_id: str, where: str) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise bad_request(f"{where} must be an object, got {shown(function)}", where.removesuffix(".function"))
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str | dict):
        raise bad_request(f"{where}.arguments must be text, got {shown(arguments)}", where.removesuffix(".function"))
    name = fields.text(function, "name", f"{where}.name")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parse_arguments(arguments)}}


def read_stream_options(call: Call, body: dict[str, Any]) -> None:
    """Completions has the same."""
    options = fields.mapping(body, "stream_options", "stream_options")
    if options and not call.stream:
        raise bad_request(f"stream_options needs stream=true, got {shown(options)}", "stream_options")
    if unknown := set(options) - STREAM_OPTIONS:
        known = ", ".join(sorted(STREAM_OPTIONS))
        raise bad_request(f"stream_options may have {known}, got {shown(sorted(unknown))}", "stream_options")
    call.stream_usage = fields.boolean(options, "include_usage", False)


error = openai_error


def render(call: Call, reply: Reply) -> dict[str, Any]:
    """Every field that some client depends on, even if it says nothing here."""
    choices = [_choice(call, reply, number) for number in range(len(reply.choices))]
    return {**_envelope(reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}


def _envelope(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _choice(call: Call, reply: Reply, number: int) -> dict[str, Any]:
    completion = reply.choices[number]
    return {
        "index": number,
        "message": _wire_message(call, completion.message),
        "logprobs": _logprobs(reply.tokens[number]) if reply.tokens else None,
        "finish_reason": _finish_reason(call, completion),
    }


def _finish_reason(call: Call, completion: Completion) -> str:
    reason = completion.finish_reason
    return "function_call" if reason == "tool_calls" and call.legacy_functions else reason


def _wire_message(call: Call, message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": "assistant", "content": message["content"], "refusal": None}
    if reasoning := message.get("reasoning_content"):
        wire["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        wire["content"] = message["content"] or None
        if call.legacy_functions:
            wire["function_call"] = _wire_call(call, calls[0])["function"]
        else:
            wire["tool_calls"] = [_wire_call(call, each) for each in calls]
    return wire


def _wire_call(call: Call, made: dict[str, Any]) -> dict[str, Any]:
    function = made["function"]
    if function["name"] in call.custom_tools:
        custom = {"name": function["name"], "input": input_of(function["arguments"])}
        return {"id": made["id"], "type": "custom", "custom": custom}
    return {**made, "function": {**function, "arguments": arguments_text(function["arguments"])}}


def _logprobs(tokens: list[SampledToken]) -> dict[str, Any]:
    content = [
        {**token_object(token.chance), "top_logprobs": [token_object(each) for each in token.alternatives]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def writer(call: Call) -> EventWriter:
    return ChatWriter(call)


class ChatWriter:
    """Writes each choice's role, then the parts of the answers, why they ended, and the usage if it was asked for."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._usage: dict[str, Any] = {"usage": None} if call.stream_usage else {}
        self._envelope: dict[str, Any] = {}
        self._index = 0
        self._tokens: list[SampledToken] = []
        """What the next chunk is made of."""

    def begin(self, reply: Reply) -> bytes:
        self._envelope = _envelope(reply, "chat.completion.chunk")
        roles = b""
        for number in reversed(range(self._call.n)):
            self._index = number
            roles = self._chunk({"role": "assistant", "content": "", "refusal": None}) + roles
        return roles

    def text(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def reasoning(self, text: str) -> bytes:
        return self._chunk({"reasoning_content": text})

    def tool_call(self, call: ToolCallEvent) -> bytes:
        """The name first, then the arguments, as the hosted service does."""
        if self._call.legacy_functions:
            if call.number:
                return b""  # there is place for one
            named = self._chunk({"function_call": {"name": call.name, "arguments": ""}})
            return named + self._chunk({"function_call": {"arguments": call.arguments}})
        kind, key, text = "function", "arguments", call.arguments
        if call.name in self._call.custom_tools:
            kind, key, text = "custom", "input", input_of(parse_arguments(call.arguments))
        head = {"index": call.number, "id": call.id, "type": kind, kind: {"name": call.name, key: ""}}
        tail = {"index": call.number, kind: {key: text}}
        return self._chunk({"tool_calls": [head]}) + self._chunk({"tool_calls": [tail]})

    def tokens(self, tokens: list[SampledToken]) -> bytes:
        self._tokens += tokens
        return b""

    def choice(self, number: int) -> bytes:
        rest = self._chunk({}) if self._tokens else b""
        self._index = number
        return rest

    def end(self, reply: Reply) -> bytes:
        last = []
        for number, completion in enumerate(reply.choices):
            last.append(self.choice(number) if number != self._index else b"")
            last.append(self._chunk({}, _finish_reason(self._call, completion)))
        if self._usage:
            last.append(sse_data({**self._envelope, "choices": [], "usage": _usage(reply)}))
        return b"".join([*last, SSE_DONE])

    def failure(self, failure: ApiError) -> bytes:
        return sse_data(openai_error(failure))

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        tokens, self._tokens = self._tokens, []
        logprobs = _logprobs(tokens) if tokens else None
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse_data({**self._envelope, "choices": [choice], **self._usage})
