"""The conversation of a Messages request, made plain. A turn there is a list of blocks; tool results are blocks of a
user's turn there, and messages of their own here."""

# MERGED-DOC
# The Message object of Anthropic, whole or where a stream begins, and its errors.
# A streamed Messages answer: one block open at a time, each started, filled and stopped.
# Anthropic's Messages.

from typing import Any

from areal.proxy.dialects import base as sse
from areal.proxy.dialects import fields
from areal.proxy.dialects.base import ParameterRules, Parts, Tool, choose, function_tool, messages_picture
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.types import Call, CallMade, EventWriter, Reply
from areal.trajectory.completion import Completion
from areal.trajectory.message import Album, Message, Picture, content_of

TEXT_BLOCKS = {"text": "text"}
BLOCKS = Parts(TEXT_BLOCKS, "image", messages_picture)


def parse_system(body: dict[str, Any]) -> list[Message]:
    system = body.get("system")
    if system is None:
        return []
    return [{"role": "system", "content": fields.content(system, TEXT_BLOCKS, "system")}]


def parse_messages(body: dict[str, Any], album: Album | None) -> list[Message]:
    turns = fields.objects(body, "messages", "messages")
    if not turns:
        raise bad_request("messages must hold at least one message, got none", "messages")
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        messages += _turn(turn, f"messages[{place}]", album)
    if messages[-1]["role"] == "assistant":
        raise bad_request(
            "messages must not end with the assistant: an answer cannot be begun for the model; "
            "end with the user's message",
            "messages",
        )
    return messages


def _turn(turn: dict[str, Any], where: str, album: Album | None) -> list[Message]:
    role = turn.get("role")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role must be user or assistant, got {role!r}", f"{where}.role")
    content = turn.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = fields.objects(turn, "content", f"{where}.content")
    places = [(block, f"{where}.content[{place}]") for place, block in enumerate(blocks)]
    if role == "assistant":
        return [_answer(places)]
    return _user_turn(role, places, f"{where}.content", album if role == "user" else None)


def _answer(blocks: list[tuple[dict[str, Any], str]]) -> Message:
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
            raise bad_request(f"{where}.type must be text, tool_use or thinking, got {kind!r}", where)
    if not message.get("reasoning_content", "unset"):
        del message["reasoning_content"]
    return message


def _user_turn(role: str, blocks: list[tuple[dict[str, Any], str]], where: str, album: Album | None) -> list[Message]:
    """Texts and pictures beside each other are one message; every tool result is one of its own."""
    messages: list[Message] = []
    said: list[str | Picture] = []
    for block, place in blocks:
        if block.get("type") == "tool_result":
            messages += _said(role, said)
            messages.append(_tool_result(block, place, album))
            said = []
        else:
            said.append(BLOCKS.part(block, place, album))
    messages += _said(role, said)
    if not messages:
        raise bad_request(f"{where} must be text or a list of blocks, got none", where)
    return messages


def _said(role: str, said: list[str | Picture]) -> list[Message]:
    return [{"role": role, "content": content_of(said)}] if said else []


def _tool_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name = fields.text(block, "name", f"{where}.name")
    arguments = fields.mapping(block, "input", f"{where}.input")
    call_id = fields.text(block, "id", f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(block: dict[str, Any], where: str, album: Album | None) -> Message:
    content = block.get("content")
    return {
        "role": "tool",
        "tool_call_id": fields.text(block, "tool_use_id", f"{where}.tool_use_id"),
        "content": "" if content is None else BLOCKS.content(content, f"{where}.content", album),
    }


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


def _message(call: Call, reply: Reply) -> dict[str, Any]:
    """Every field of the object; a reply without choices has said nothing yet."""
    completion = reply.choices[0] if reply.choices else None
    return {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [] if completion is None else _blocks(completion),
        **_ending(call, completion),
        "usage": _usage(reply),
    }


def _ending(call: Call, completion: Completion | None) -> dict[str, Any]:
    stopped_at = None if completion is None else _stop_text(call, completion)
    return {"stop_reason": _stop_reason(completion, stopped_at), "stop_sequence": stopped_at}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def error(failure: ApiError) -> dict[str, Any]:
    """`code` is ours: it names what the type leaves open, such as a conversation that is too long."""
    kind = ERROR_TYPES.get(failure.status, "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": failure.message}
    if failure.code is not None:
        body["code"] = failure.code
    if failure.param == "thread":  # by this, the SDK's tool runner goes on without threads
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body, "request_id": None}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_block(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _blocks(completion: Completion) -> list[dict[str, Any]]:
    said = completion.message
    calls = [
        _tool_block(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in said.get("tool_calls", ())
    ]
    blocks = [_thinking_block(said["reasoning_content"])] if said.get("reasoning_content") else []
    if said["content"] or not calls:
        blocks.append(_text_block(said["content"]))
    return [*blocks, *calls]


def _stop_reason(completion: Completion | None, stopped_at: str | None) -> str | None:
    if completion is None:
        return None
    if completion.truncated:
        return "max_tokens"
    if completion.message.get("tool_calls"):
        return "tool_use"
    return "end_turn" if stopped_at is None else "stop_sequence"


def _stop_text(call: Call, completion: Completion) -> str | None:
    """The stop text that ended the answer: the one that stands first."""
    found = [(at, stop) for stop in call.stop or () if (at := completion.text.find(stop)) >= 0]
    return min(found)[1] if found else None


class MessageWriter:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._blocks = 0
        self._open: str | None = None
        """Type of the block that is open."""

    def begin(self, reply: Reply) -> bytes:
        return self._event("message_start", message=_message(self._call, reply))

    def text(self, text: str) -> bytes:
        return self._block("text", _text_block("")) + self._delta(type="text_delta", text=text)

    def reasoning(self, text: str) -> bytes:
        return self._block("thinking", _thinking_block("")) + self._delta(type="thinking_delta", thinking=text)

    def call(self, call: CallMade) -> bytes:
        opening = self._close() + self._block("tool_use", _tool_block(call.id, call.name, {}))
        return opening + self._delta(type="input_json_delta", partial_json=call.arguments)

    def end(self, reply: Reply) -> bytes:
        opening = b"" if self._blocks else self._block("text", _text_block(""))
        ending = _ending(self._call, reply.choices[0])
        return (
            opening
            + self._close()
            + self._event("message_delta", delta=ending, usage=_usage(reply))
            + self._event("message_stop")
        )

    def failure(self, failure: ApiError) -> bytes:
        return sse.event("error", error(failure))

    def _block(self, kind: str, content: dict[str, Any]) -> bytes:
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
        return sse.event(name, {"type": name, **values})


__all__ = ["error", "parse", "render", "writer"]

CONVERSATION = frozenset(("model", "messages", "system", "tools", "tool_choice", "output_config"))
SAMPLING = frozenset(("max_tokens", "temperature", "top_p", "top_k", "stop_sequences"))
HONOURED = CONVERSATION | SAMPLING | {"stream"}
HARMLESS = frozenset(("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"))
"""Where and how fast the hosted service computes; no answer depends on it."""

MEANINGLESS: dict[str, tuple[Any, ...]] = {"thinking": ({"type": "disabled"},), "mcp_servers": ([],)}
"""Parameters that are not honoured, and the values by which they ask for nothing."""

CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def parse(body: dict[str, Any], terms: ParameterRules) -> Call:
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
    return _message(call, reply)


def writer(call: Call) -> EventWriter:
    return MessageWriter(call)


def _tools(body: dict[str, Any], terms: ParameterRules) -> list[Tool]:
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


def _format(body: dict[str, Any], terms: ParameterRules) -> dict[str, Any] | None:
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
