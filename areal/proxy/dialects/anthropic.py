"""Anthropic's Messages: a request read, an answer written whole or as a stream, and errors.

A turn is a list of blocks. In Messages, tool results are blocks of a user turn; internally each is a message.
"""

from collections.abc import Sequence
from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.base import (
    MAX_TOKENS,
    ContentParts,
    Images,
    ParameterRules,
    Tool,
    choose_tool,
    function_tool,
    sse_event,
)
from areal.proxy.dialects.sampling import thinking
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.types import Call, EventWriter, Reply, SampledToken, ToolCallEvent
from areal.trajectory.message import Image, Message, content_of
from areal.trajectory.tree import Completion
from areal.utils.images import read_base64
from areal.utils.shorten import shown

CONVERSATION = frozenset(("model", "messages", "system", "tools", "tool_choice", "output_config"))
SAMPLING = frozenset(("max_tokens", "temperature", "top_p", "top_k", "stop_sequences"))
HONOURED = CONVERSATION | SAMPLING | {"stream", "thinking"}
HARMLESS = frozenset(("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"))
"""Where and how fast the hosted service computes; no answer depends on it."""
MEANINGLESS: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],)}
"""Parameters that are not honoured, and the values by which they ask for nothing."""

TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

Block = dict[str, Any]


GROWING = ""


def parse(body: dict[str, Any], rules: ParameterRules, past: Sequence[Message] = ()) -> Call:
    """Raises ApiError 400 naming the parameter."""
    if body.get("max_tokens") is None:
        raise bad_request("max_tokens must be given: how many tokens the answer may have, got none", "max_tokens")
    return parse_counted(body, rules)


def parse_counted(body: dict[str, Any], rules: ParameterRules) -> Call:
    """The same for a request whose tokens are counted and which gets no answer."""
    rules.refuse_unsupported(body, HONOURED | HARMLESS, MEANINGLESS)
    limit = fields.integer(body, "max_tokens", 1, MAX_TOKENS)
    messages, beginning = _messages(body, rules.images)
    call = Call(
        messages=[*_system(body), *messages],
        prefill=beginning,
        thinks=_thinks(body, rules),
        id_prefix="msg_",
        model=fields.optional_text(body, "model") or "",
        tools=_tools(body, rules) or None,
        response_format=_format(body, rules),
        format_param="output_config",
        max_tokens=limit,
        temperature=fields.number(body, "temperature", 0, 1),
        top_p=fields.top_p(body),
        top_k=fields.integer(body, "top_k", 0, MAX_TOKENS),
        stop=fields.texts(body, "stop_sequences"),
        stream=fields.boolean(body, "stream", False),
    )
    _tool_choice(call, fields.mapping(body, "tool_choice", "tool_choice"))
    if beginning and call.response_format is not None:  # the rest alone would follow it, the turn would not
        raise bad_request(
            "messages must not end with the assistant where output_config has a format, which is that of a whole "
            "answer; end with the user's message",
            "messages",
        )
    return call


def _system(body: dict[str, Any]) -> list[Message]:
    system = body.get("system")
    return [] if system is None else [{"role": "system", "content": BLOCKS.text(system, "system")}]


def _thinks(body: dict[str, Any], rules: ParameterRules) -> bool | None:
    """`budget_tokens` is no limit here: `max_tokens` is."""
    wanted = fields.mapping(body, "thinking", "thinking")
    kind = wanted.get("type", "adaptive")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad_request(f"thinking.type must be enabled, disabled or adaptive, got {shown(kind)}", "thinking")
    fields.integer(wanted, "budget_tokens", 1, MAX_TOKENS)
    return None if kind == "adaptive" else thinking(kind == "enabled", wanted, "thinking", rules)


def _messages(body: dict[str, Any], images: Images) -> tuple[list[Message], str]:
    """And how the answer begins: what the assistant says last."""
    turns = fields.objects(body, "messages", "messages")
    if not turns:
        raise bad_request("messages must hold at least one message, got none", "messages")
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        messages += _turn(turn, f"messages[{place}]", images)
    last = messages[-1]
    if last["role"] != "assistant":
        return messages, ""
    if set(last) != {"role", "content"} or not last["content"] or len(messages) == 1:
        raise bad_request(
            "messages may end with the assistant only to begin its answer with a text, after a message of the user; "
            "end with the user's message",
            "messages",
        )
    return messages[:-1], last["content"]


def _turn(turn: dict[str, Any], where: str, images: Images) -> list[Message]:
    role = turn.get("role")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role must be user or assistant, got {shown(role)}", f"{where}.role")
    content = turn.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    where = f"{where}.content"
    blocks = [(block, f"{where}[{place}]") for place, block in enumerate(fields.objects(turn, "content", where))]
    if role == "assistant":
        return [_assistant_message(blocks)]
    return _user_messages(role, blocks, where, images if role == "user" else None)


def _assistant_message(blocks: list[tuple[Block, str]]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for block, where in blocks:
        kind = block.get("type")
        if kind == "text":
            message["content"] += fields.text(block, "text", where)
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + fields.text(block, "thinking", where)
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_tool_call(block, where))
        else:
            raise bad_request(f"{where}.type must be text, tool_use or thinking, got {shown(kind)}", where)
    if message.get("reasoning_content") == "":
        del message["reasoning_content"]
    return message


def _user_messages(role: str, blocks: list[tuple[Block, str]], where: str, images: Images) -> list[Message]:
    """Texts and images in a row are one message; every tool result is a message of its own."""
    messages: list[Message] = []
    parts: list[str | Image] = []
    for block, place in blocks:
        if block.get("type") == "tool_result":
            messages += _message_of(role, parts)
            messages.append(_tool_result(block, place, images))
            parts = []
        else:
            parts.append(BLOCKS.part(block, place, images))
    messages += _message_of(role, parts)
    if not messages:
        raise bad_request(f"{where} must be text or a list of blocks, got none", where)
    return messages


def _message_of(role: str, parts: list[str | Image]) -> list[Message]:
    return [{"role": role, "content": content_of(parts)}] if parts else []


def _image(block: Block, where: str) -> bytes:
    source = fields.mapping(block, "source", f"{where}.source")
    if source.get("type") != "base64":
        raise bad_request(
            f"{where}.source.type must be base64: nothing is downloaded here, got {shown(source.get('type'))}", where
        )
    return read_base64(fields.text(source, "data", f"{where}.source.data"))


BLOCKS = ContentParts({"text": "text"}, "image", _image)


def _tool_call(block: Block, where: str) -> dict[str, Any]:
    name = fields.text(block, "name", f"{where}.name")
    arguments = fields.mapping(block, "input", f"{where}.input")
    call_id = fields.text(block, "id", f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(block: Block, where: str, images: Images) -> Message:
    content = block.get("content")
    return {
        "role": "tool",
        "tool_call_id": fields.text(block, "tool_use_id", f"{where}.tool_use_id"),
        "content": "" if content is None else BLOCKS.content(content, f"{where}.content", images),
    }


def _tools(body: dict[str, Any], rules: ParameterRules) -> list[Tool]:
    tools = []
    for place, tool in enumerate(fields.objects(body, "tools", "tools")):
        if tool.get("type") not in (None, "custom"):
            rules.refuse_or_drop("tools", tool["type"], "must be the client's own: hosted ones are not served here")
            continue
        tools.append(function_tool(tool, "input_schema", f"tools[{place}]"))
    return tools


def _tool_choice(call: Call, choice: dict[str, Any]) -> None:
    kind = choice.get("type", "auto")
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise bad_request(
            f"tool_choice.type must be one of {', '.join(TOOL_CHOICES)}, got {shown(kind)}", "tool_choice"
        )
    choose_tool(call, TOOL_CHOICES[kind], choice.get("name"))
    call.parallel_tool_calls = not fields.boolean(choice, "disable_parallel_tool_use", False)


def _format(body: dict[str, Any], rules: ParameterRules) -> dict[str, Any] | None:
    config = fields.mapping(body, "output_config", "output_config")
    if unknown := {name: value for name, value in config.items() if name != "format" and value is not None}:
        rules.refuse_or_drop("output_config", unknown, "may have a format only")
    wanted = fields.mapping(config, "format", "output_config.format")
    if not wanted:
        return None
    if wanted.get("type") != "json_schema":
        raise bad_request(
            f"output_config.format.type must be json_schema, got {shown(wanted.get('type'))}", "output_config"
        )
    schema = fields.mapping(wanted, "schema", "output_config.format.schema")
    return {"type": "json_schema", "schema": schema, "strict": True}


def render(call: Call, reply: Reply) -> dict[str, Any]:
    """Every field of the object; a reply without choices has no content yet."""
    completion = reply.choices[0] if reply.choices else None
    return {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [] if completion is None else _content(completion, reply.beginning),
        **_ending(call, completion, reply.beginning),
        "usage": _usage(reply),
    }


def _content(completion: Completion, beginning: str) -> list[Block]:
    message = completion.message
    text = message["content"].removeprefix(beginning)
    calls = [
        _tool_block(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    blocks = [_thinking_block(message["reasoning_content"])] if message.get("reasoning_content") else []
    if text or not calls:
        blocks.append(_text_block(text))
    return [*blocks, *calls]


def _text_block(text: str) -> Block:
    return {"type": "text", "text": text, "citations": None}


def _thinking_block(text: str) -> Block:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_block(call_id: str, name: str, arguments: dict[str, Any]) -> Block:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _ending(call: Call, completion: Completion | None, beginning: str) -> dict[str, Any]:
    if completion is None:
        return {"stop_reason": None, "stop_sequence": None}
    stop_text = _stop_text(call, completion.text.removeprefix(beginning))
    if completion.truncated:
        reason = "max_tokens"
    elif completion.message.get("tool_calls"):
        reason = "tool_use"
    else:
        reason = "end_turn" if stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop_text}


def _stop_text(call: Call, text: str) -> str | None:
    """The stop text that ended the answer: the first one in it."""
    found = [(at, stop) for stop in call.stop or () if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def writer(call: Call) -> EventWriter:
    return MessageWriter(call)


class MessageWriter:
    """Keeps one block open at a time: each is started, filled and stopped."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._blocks = 0
        self._open: str | None = None
        """Type of the block that is open."""

    def begin(self, reply: Reply) -> bytes:
        return self._event("message_start", message=render(self._call, reply))

    def text(self, text: str) -> bytes:
        return self._block("text", _text_block("")) + self._delta(type="text_delta", text=text)

    def reasoning(self, text: str) -> bytes:
        return self._block("thinking", _thinking_block("")) + self._delta(type="thinking_delta", thinking=text)

    def tool_call(self, call: ToolCallEvent) -> bytes:
        opening = self._close() + self._block("tool_use", _tool_block(call.id, call.name, {}))
        return opening + self._delta(type="input_json_delta", partial_json=call.arguments)

    def tokens(self, tokens: list[SampledToken]) -> bytes:
        return b""

    def choice(self, number: int) -> bytes:
        return b""

    def end(self, reply: Reply) -> bytes:
        opening = b"" if self._blocks else self._block("text", _text_block(""))
        ending = _ending(self._call, reply.choices[0], reply.beginning)
        return (
            opening
            + self._close()
            + self._event("message_delta", delta=ending, usage=_usage(reply))
            + self._event("message_stop")
        )

    def failure(self, failure: ApiError) -> bytes:
        return sse_event("error", error(failure))

    def _block(self, kind: str, content: Block) -> bytes:
        """Open a block of that type, unless it is open."""
        if self._open == kind:
            return b""
        closing = self._close()
        self._open = kind
        self._blocks += 1
        return closing + self._event("content_block_start", index=self._blocks - 1, content_block=content)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return self._event("content_block_stop", index=self._blocks - 1)

    def _delta(self, **delta: Any) -> bytes:
        return self._event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _event(self, name: str, /, **values: Any) -> bytes:
        return sse_event(name, {"type": name, **values})


def error(failure: ApiError) -> dict[str, Any]:
    """`code` is our addition: it says what the type leaves open, such as a conversation that is too long."""
    kind = ERROR_TYPES.get(failure.status, "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": failure.message}
    if failure.code is not None:
        body["code"] = failure.code
    if failure.param == "thread":  # by this, the SDK's tool runner goes on without threads
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body, "request_id": None}
