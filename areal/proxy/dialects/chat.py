"""OpenAI's Chat Completions: a request read, an answer written whole or as a stream, and errors."""

from collections.abc import Sequence
from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.base import (
    MAX_TOKENS,
    SSE_DONE,
    ContentParts,
    Images,
    ParameterRules,
    Tool,
    function_tool,
    openai_error,
    openai_format,
    openai_tool_choice,
    sse_data,
)
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.types import Call, EventWriter, Reply, ToolCallEvent
from areal.trajectory.message import Content, Message, arguments_text, parse_arguments
from areal.utils.images import read_data_url
from areal.utils.shorten import shown

CONVERSATION = frozenset(("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"))
SAMPLING = frozenset(("n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed", "logprobs"))
HONOURED = CONVERSATION | SAMPLING | {"stream", "stream_options"}

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

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""`developer` is a newer name for `system`, which is the one that chat templates know."""
ROLES_WITH_IMAGES = ("user", "tool")


GROWING = "messages"


def parse(body: dict[str, Any], rules: ParameterRules, past: Sequence[Message] = ()) -> Call:
    """Raises ApiError 400 naming the parameter."""
    rules.refuse_unsupported(body, HONOURED, MEANINGLESS)
    limit = fields.integer(body, "max_completion_tokens", 1, MAX_TOKENS)
    call = Call(
        messages=_messages(body, rules.images, past),
        model=fields.optional_text(body, "model") or "",
        tools=_tools(body) or None,
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
        stream=fields.boolean(body, "stream", False),
    )
    openai_tool_choice(call, body, rules, "function")
    _stream_options(call, body)
    return call


def _messages(body: dict[str, Any], images: Images, past: Sequence[Message]) -> list[Message]:
    messages = fields.objects(body, GROWING, GROWING)
    if not messages:
        raise bad_request("messages must hold at least one message, got none", GROWING)
    newer = enumerate(messages, len(past))
    return [*past, *(_message(message, f"messages[{place}]", images) for place, message in newer)]


def _message(wire: dict[str, Any], where: str, images: Images) -> Message:
    role = wire.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{where}.role")
    message: Message = {"role": ROLES[role], "content": _content(wire, where, images)}
    if calls := fields.objects(wire, "tool_calls", f"{where}.tool_calls"):
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    if wire.get("function_call") is not None:
        raise bad_request(f"{where}.function_call is not supported; use tool_calls", f"{where}.function_call")
    for name in ("tool_call_id", "name", "reasoning_content"):
        if wire.get(name) is not None:
            message[name] = fields.text(wire, name, f"{where}.{name}")
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
    function = call.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function must be an object, got {shown(function)}", where)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str | dict):
        raise bad_request(f"{where}.function.arguments must be text, got {shown(arguments)}", where)
    name = fields.text(function, "name", f"{where}.function.name")
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": parse_arguments(arguments)},
    }


def _tools(body: dict[str, Any]) -> list[Tool]:
    tools = []
    for place, tool in enumerate(fields.objects(body, "tools", "tools")):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad_request(f"tools[{place}] must be of type function, got {shown(tool.get('type'))}", "tools")
        tools.append(function_tool(function, "parameters", f"tools[{place}].function"))
    return tools


def _stream_options(call: Call, body: dict[str, Any]) -> None:
    options = fields.mapping(body, "stream_options", "stream_options")
    if options and not call.stream:
        raise bad_request(f"stream_options needs stream=true, got {shown(options)}", "stream_options")
    if unknown := set(options) - STREAM_OPTIONS:
        known = ", ".join(sorted(STREAM_OPTIONS))
        raise bad_request(f"stream_options may have {known}, got {shown(sorted(unknown))}", "stream_options")
    call.stream_usage = fields.boolean(options, "include_usage", False)
    if call.stream and call.n > 1:
        raise bad_request(f"n must be 1 if stream is true, got {call.n}; ask for several answers without it", "n")


def render(call: Call, reply: Reply) -> dict[str, Any]:
    """Every field that some client depends on, even if it says nothing here."""
    choices = [_choice(reply, number) for number in range(len(reply.choices))]
    return {**_envelope(reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}


def _envelope(reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": None,
    }


def _choice(reply: Reply, number: int) -> dict[str, Any]:
    completion = reply.choices[number]
    return {
        "index": number,
        "message": _wire_message(completion.message),
        "logprobs": _logprobs(reply, number),
        "finish_reason": completion.finish_reason,
    }


def _wire_message(message: Message) -> dict[str, Any]:
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


def _logprobs(reply: Reply, number: int) -> dict[str, Any] | None:
    """For visible tokens, so without the end token."""
    if not reply.tokens:
        return None
    completion, texts = reply.choices[number], reply.tokens[number]
    visible = len(texts) - (completion.end_id is not None)
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts[:visible], completion.logprobs.tolist()[:visible], strict=True)
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
    """Writes the role, then the parts of the answer, why it ended, and the usage if it was asked for."""

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

    def tool_call(self, call: ToolCallEvent) -> bytes:
        """The name first, then the arguments, as the hosted service does."""
        function = {"name": call.name, "arguments": ""}
        head = {"index": call.number, "id": call.id, "type": "function", "function": function}
        tail = {"index": call.number, "function": {"arguments": call.arguments}}
        return self._chunk({"tool_calls": [head]}) + self._chunk({"tool_calls": [tail]})

    def end(self, reply: Reply) -> bytes:
        (completion,) = reply.choices
        last = self._chunk({}, completion.finish_reason, _logprobs(reply, 0))
        if self._usage:
            last += sse_data({**self._envelope, "choices": [], "usage": _usage(reply)})
        return last + SSE_DONE

    def failure(self, failure: ApiError) -> bytes:
        return sse_data(error(failure))

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse_data({**self._envelope, "choices": [choice], **self._usage})


def error(failure: ApiError) -> dict[str, Any]:
    return openai_error(failure)
