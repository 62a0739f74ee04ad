"""The input of a Responses request, a list of items, made a conversation of messages.

An answer is several items there (thinking, a message, function calls) and one message here. Items of an assistant join
one turn until something comes that the turn has already.
"""

# MERGED-DOC
# The Response object and the items in it, whole or while they are streamed.
# A streamed Responses answer: every item is added, filled and done; the message stays open while calls are made.
# OpenAI's Responses.

import itertools
import time
from typing import Any

from areal.proxy.dialects import base as sse
from areal.proxy.dialects import fields
from areal.proxy.dialects.base import ParameterRules, Parts, Tool, choose, function_tool, responses_picture
from areal.proxy.dialects.chat import error
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.types import Call, CallMade, EventWriter, Reply
from areal.trajectory.message import Album, Message, arguments_text, parse_arguments

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
PARTS = Parts(TEXT_PARTS, "input_image", responses_picture)
THOUGHT_PARTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}


def parse_input(body: dict[str, Any], album: Album | None) -> list[Message]:
    wire = body.get("input")
    if isinstance(wire, str):
        return [{"role": "user", "content": wire}]
    items = fields.objects(body, "input", "input")
    if not items:
        raise bad_request("input must be a text or hold at least one item, got none", "input")
    conversation = _Conversation(album)
    for place, item in enumerate(items):
        conversation.add(item, f"input[{place}]")
    return conversation.messages


class _Conversation:
    def __init__(self, album: Album | None) -> None:
        self._album = album
        self.messages: list[Message] = []
        self._turn: Message | None = None
        """The assistant's turn that further items may join."""
        self._said = False
        """That turn has a message already."""

    def add(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._join().setdefault("tool_calls", []).append(_tool_call(item, where))
        elif kind == "function_call_output":
            self._close()
            self.messages.append(_tool_result(item, where, self._album))
        elif kind == "reasoning":
            self._reasoning(item, where)
        else:
            raise bad_request(
                f"{where}.type must be message, function_call, function_call_output or reasoning, got {kind!r}", where
            )

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{where}.role")
        if role == "user":
            self._close()
            content = PARTS.content(item.get("content"), f"{where}.content", self._album)
            self.messages.append({"role": role, "content": content})
            return
        text = fields.content(item.get("content"), TEXT_PARTS, f"{where}.content")
        if role != "assistant":
            self._close()
            self.messages.append({"role": ROLES[role], "content": text})
            return
        if self._said:
            self._close()
        self._join()["content"] = text
        self._said = True

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        """Thinking is text here; what is encrypted elsewhere cannot be read and is no part of the conversation."""
        self._close()
        thought = fields.content(item.get("content") or item.get("summary") or [], THOUGHT_PARTS, f"{where}.content")
        if thought:
            self._join()["reasoning_content"] = thought

    def _join(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def _close(self) -> None:
        self._turn, self._said = None, False


def _tool_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = parse_arguments(fields.text(item, "arguments", f"{where}.arguments"))
    name = fields.text(item, "name", f"{where}.name")
    call_id = fields.text(item, "call_id", f"{where}.call_id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(item: dict[str, Any], where: str, album: Album | None) -> Message:
    call_id = fields.text(item, "call_id", f"{where}.call_id")
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "content": PARTS.content(item.get("output"), f"{where}.output", album),
    }


Item = dict[str, Any]


def response(call: Call, reply: Reply, output: list[Item]) -> dict[str, Any]:
    """Every field of the object, whether or not it says anything; a reply without choices is still in progress."""
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "completed_at": int(time.time()) if reply.choices else None,
        "status": _status(reply),
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if _truncated(reply) else None,
        "max_output_tokens": call.max_tokens,
        "model": reply.model,
        "output": output,
        "parallel_tool_calls": call.parallel_tool_calls,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "truncation": "disabled",
        "usage": _usage(reply) if reply.choices else None,
        **{"instructions": None, "metadata": {}, "previous_response_id": None, "reasoning": None, "user": None},
        **{"store": True, "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}},
        **call.echo,
    }


def output_items(reply: Reply) -> list[Item]:
    """Thinking, then the message, then the calls; an answer that says nothing is an empty message."""
    (completion,) = reply.choices
    message = completion.message
    calls = message.get("tool_calls", ())
    items = []
    if thought := message.get("reasoning_content"):
        items.append(reasoning_item(reply, thought, "completed"))
    status = "incomplete" if completion.truncated else "completed"
    if message["content"] or not calls:
        items.append(message_item(reply, [text_part(message["content"])], status))
    for number, call in enumerate(calls):
        function = call["function"]
        made = CallMade(number, call["id"], function["name"], arguments_text(function["arguments"]))
        items.append(call_item(reply, made, made.arguments, "completed"))
    return items


def message_item(reply: Reply, content: list[dict[str, Any]], status: str) -> Item:
    return {
        "id": f"msg_{_name(reply)}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def reasoning_item(reply: Reply, thought: str | None, status: str) -> Item:
    content = [] if thought is None else [thought_part(thought)]
    return {"id": f"rs_{_name(reply)}", "type": "reasoning", "status": status, "summary": [], "content": content}


def call_item(reply: Reply, call: CallMade, arguments: str, status: str) -> Item:
    return {
        "id": f"fc_{_name(reply)}_{call.number}",
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _name(reply: Reply) -> str:
    return reply.id.removeprefix("resp_")


def _truncated(reply: Reply) -> bool:
    return any(choice.truncated for choice in reply.choices)


def _status(reply: Reply) -> str:
    if not reply.choices:
        return "in_progress"
    return "incomplete" if _truncated(reply) else "completed"


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
    }


class ResponseWriter:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._numbers = itertools.count()
        self._output: list[Item] = []
        """In order of appearance, each as it is known now."""
        self._thought: _TextItem | None = None
        self._message: _TextItem | None = None

    def begin(self, reply: Reply) -> bytes:
        self._reply = reply
        snapshot = {"response": response(self._call, reply, [])}
        return self._event("response.created", **snapshot) + self._event("response.in_progress", **snapshot)

    def text(self, text: str) -> bytes:
        opening = self._close_thought() + self._open_message()
        assert self._message is not None
        self._message.text += text
        return opening + self._part_event("response.output_text.delta", self._message, delta=text, logprobs=[])

    def reasoning(self, text: str) -> bytes:
        opening = b""
        if self._thought is None:
            item = reasoning_item(self._reply, None, "in_progress")
            self._thought = _TextItem(item["id"], self._add(item))
            opening = self._added(item) + self._part_added(self._thought, thought_part(""))
        self._thought.text += text
        return opening + self._part_event("response.reasoning_text.delta", self._thought, delta=text)

    def call(self, call: CallMade) -> bytes:
        opening = self._close_thought()
        item = call_item(self._reply, call, "", "in_progress")
        index = self._add(item)
        place = {"item_id": item["id"], "output_index": index}
        parts = [
            opening,
            self._added(item),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._done(index, call_item(self._reply, call, call.arguments, "completed")),
        ]
        return b"".join(parts)

    def end(self, reply: Reply) -> bytes:
        (completion,) = reply.choices
        parts = [self._close_thought()]
        if not completion.message.get("tool_calls"):
            parts.append(self._open_message())  # an answer that says nothing is an empty message
        parts.append(self._close_message("incomplete" if completion.truncated else "completed"))
        name = "response.incomplete" if completion.truncated else "response.completed"
        parts.append(self._event(name, response=response(self._call, reply, self._output)))
        return b"".join(parts)

    def failure(self, failure: ApiError) -> bytes:
        """Said twice: the documented event has the fields at its top, and SDKs raise where there is an `error`."""
        body = {"code": failure.code, "message": failure.message, "param": failure.param}
        return self._event("error", **body, error={"type": failure.kind, **body})

    def _open_message(self) -> bytes:
        if self._message is not None:
            return b""
        item = message_item(self._reply, [], "in_progress")
        self._message = _TextItem(item["id"], self._add(item))
        return self._added(item) + self._part_added(self._message, text_part(""))

    def _close_message(self, status: str) -> bytes:
        message = self._message
        if message is None:
            return b""
        part = text_part(message.text)
        return (
            self._part_event("response.output_text.done", message, text=message.text, logprobs=[])
            + self._part_event("response.content_part.done", message, part=part)
            + self._done(message.index, message_item(self._reply, [part], status))
        )

    def _close_thought(self) -> bytes:
        thought = self._thought
        if thought is None or thought.closed:
            return b""
        thought.closed = True
        return (
            self._part_event("response.reasoning_text.done", thought, text=thought.text)
            + self._part_event("response.content_part.done", thought, part=thought_part(thought.text))
            + self._done(thought.index, reasoning_item(self._reply, thought.text, "completed"))
        )

    def _add(self, item: Item) -> int:
        self._output.append(item)
        return len(self._output) - 1

    def _added(self, item: Item) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _done(self, index: int, item: Item) -> bytes:
        self._output[index] = item
        return self._event("response.output_item.done", output_index=index, item=item)

    def _part_added(self, item: "_TextItem", part: dict[str, Any]) -> bytes:
        return self._part_event("response.content_part.added", item, part=part)

    def _part_event(self, name: str, item: "_TextItem", **values: Any) -> bytes:
        return self._event(name, item_id=item.id, output_index=item.index, content_index=0, **values)

    def _event(self, name: str, /, **values: Any) -> bytes:
        return sse.event(name, {"type": name, "sequence_number": next(self._numbers), **values})


class _TextItem:
    """An item whose text grows."""

    def __init__(self, item_id: str, index: int) -> None:
        self.id = item_id
        self.index = index
        self.text = ""
        self.closed = False


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


def parse(body: dict[str, Any], terms: ParameterRules) -> Call:
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


def _tools(body: dict[str, Any], terms: ParameterRules) -> list[Tool]:
    tools = []
    for place, tool in enumerate(fields.objects(body, "tools", "tools")):
        if tool.get("type") != "function":
            terms.refuse("tools", tool.get("type"), "must be of type function: nothing else is served here")
            continue
        tools.append(function_tool(tool, "parameters", f"tools[{place}]"))
    return tools


def _choose_tool(call: Call, body: dict[str, Any], terms: ParameterRules) -> None:
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
